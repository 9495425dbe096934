import pytest


@pytest.fixture
def worker(tmp_path, monkeypatch):
    """Write a worker module with this body of `work(request)` and return its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(body):
        lines = "\n".join(f"    {line}" for line in body.splitlines())
        text = f"from trainpace.core.worker import serve\ndef work(request):\n{lines}\nif __name__ == '__main__':\n    serve(work)\n"
        (tmp_path / "made_worker.py").write_text(text)
        return "made_worker"

    return make

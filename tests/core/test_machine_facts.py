"""Facts about the host: CPU quotas and the user's folders."""

from pathlib import Path

import pytest

from trainpace.core.host import allowed_cores, quota_cores, usable_cores, user_folder

V1_PERIOD = {"cpu/a/b/cpu.cfs_period_us": "10000\n"}


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """Write /proc/self/cgroup and files of /sys/fs/cgroup below `root`."""
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (files | {"proc/self/cgroup": groups}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job\n", {"job/cpu.max": "45000 100000\n"}, 0.45),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
        ("0::/job\n", {}, None),
        ("2:cpu,cpuacct:/a/b\n0::/a/b\n", V1_PERIOD | {"cpu/a/b/cpu.cfs_quota_us": "5000\n"}, 0.5),
        ("2:cpu,cpuacct:/a/b\n", V1_PERIOD | {"cpu/a/b/cpu.cfs_quota_us": "-1\n"}, None),
        ("not a kernel's line\n", {}, None),
    ],
)
def test_quota_is_read_from_cgroup_v1_and_v2(tmp_path, groups, files, cores):
    root = tree(tmp_path, groups, files)
    assert quota_cores(root) == cores
    assert allowed_cores(root) == (usable_cores() if cores is None else cores)


def test_parent_cgroup_quota_applies(tmp_path):
    files = {"pod/cpu.max": "50000 100000\n", "pod/job/cpu.max": "200000 100000\n"}
    root = tree(tmp_path, "0::/pod/job\n", files)
    assert quota_cores(root) == 0.5
    assert allowed_cores(root) == 0.5


def test_quota_above_usable_cores_is_ignored(tmp_path):
    root = tree(tmp_path, "0::/\n", {"cpu.max": "99000000 100000\n"})
    assert allowed_cores(root) == usable_cores()


def test_missing_proc_means_no_quota(tmp_path):
    assert quota_cores(tmp_path) is None


def test_user_folders_follow_the_xdg_specification(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    assert user_folder("cache") == tmp_path / "trainpace"
    assert user_folder("config") == Path.home() / ".config" / "trainpace"

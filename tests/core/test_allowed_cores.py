"""A control group's quota counts as the cores that there are."""

import pytest

from trainpace.core.child import allowed_cores, usable_cores


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/job\n", {"job/cpu.max": "45000 100000\n"}, 0.45),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
        ("0::/job\n", {}, None),
        (
            "2:cpu,cpuacct:/a/b\n0::/a/b\n",
            {"cpu/a/b/cpu.cfs_quota_us": "5000\n", "cpu/a/b/cpu.cfs_period_us": "10000\n"},
            0.5,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        (
            "1:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "99000000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("not of a kernel\n", {}, None),
    ],
)
def test_a_quota_is_a_number_of_cores(tmp_path, groups, files, cores):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert allowed_cores(tmp_path / "groups", tmp_path) == (
        usable_cores() if cores is None else cores
    )
    assert allowed_cores(tmp_path / "nothing", tmp_path) == usable_cores()

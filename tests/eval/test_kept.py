"""Rows that are kept by hash: checks, locks and the room that they take."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from mdc.errors import UserError
from mdc.eval.kept import SOURCE, _create, _RowFile, absent, as_float16, make_room, reserved
from mdc.files import code_version, whole_folder, write_manifest


def test_features_that_are_not_finite_are_refused_with_their_keys() -> None:
    features_BD = torch.ones(4, 3)
    features_BD[1, 2], features_BD[3, 0] = torch.nan, 1e6
    with pytest.raises(UserError, match=r"model features of 2 pictures .*: b, d;"):
        as_float16(features_BD, "model features", ["a", "b", "c", "d"])
    patches_BPD = features_BD[:, None].expand(4, 2, 3)
    with pytest.raises(UserError, match=r"of 2 pictures .*: b, d;"):
        as_float16(patches_BPD, "features", ["a", "b", "c", "d"])
    assert as_float16(patches_BPD[[0, 2]], "features", ["a", "c"]).shape == (2, 2, 3)


@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
def test_rows_come_in_any_order_and_every_one_must(tmp_path: Path, dtype: type) -> None:
    values = np.arange(12, dtype=dtype).reshape(4, 3)
    place = _create(tmp_path, values[:1], 4)
    for numbers in ([3, 0], [1]):
        with _RowFile(*place) as file:
            file.write(numbers, values[numbers])
    with pytest.raises(UserError, match=r"row 2 and 0 more did not come"):
        file.check()
    with _RowFile(*place) as file:
        file.write([2], values[2:3])
    file.check()
    np.testing.assert_array_equal(np.load(place[0]), values)
    np.save(tmp_path / "plain.npy", values)
    assert place[0].read_bytes() == (tmp_path / "plain.npy").read_bytes()


def test_a_folder_that_a_host_does_not_see_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all hosts must see the same folder"), _RowFile(tmp_path / "rows.npy", 128):
        pass


def test_a_second_maker_waits_for_the_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, done = tmp_path / "a", []

    def second() -> None:
        with reserved([folder, tmp_path / "b"]):
            done.extend(absent([folder]))
            done.append("second")

    with reserved([folder]):
        thread = threading.Thread(target=second)
        thread.start()
        while "waiting for it" not in caplog.text:
            thread.join(0.05)
        done.append("first")
        with whole_folder(folder) as temporary:
            write_manifest(temporary, {}, {})
    thread.join(30)
    assert done == ["first", "second"]
    assert f"is being written by process {os.getpid()}" in caplog.text


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "used", "new", ".killed.77.tmp", "held")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows.npy").write_bytes(bytes(100))
        os.utime(tmp_path / name, (number, number))
    make_room(tmp_path, 500, [])
    assert len(list(tmp_path.glob("*"))) == 5
    os.utime(tmp_path / "old", (9, 9))
    make_room(tmp_path, 400, [])
    assert not (tmp_path / "used").exists()
    with reserved([tmp_path / "held"]):
        make_room(tmp_path, 0, [tmp_path / "new"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held", "held.lock", "new"]


def test_the_source_that_numbers_depend_on_is_there() -> None:
    for pattern in SOURCE:
        assert code_version(pattern) != code_version("nothing.py"), pattern

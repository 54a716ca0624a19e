"""``states.py``, which ``make test-matrix`` runs on all versions, on this one."""

from . import states


def test_restores_and_tells_what_differs(tmp_path):
    states.save("accumulate_rows", tmp_path)
    assert not list(states.restore("accumulate_rows", tmp_path))
    plain = tmp_path / "plain"
    plain.write_text(plain.read_text().replace('"float32"', '"float16"', 1))
    readers = [line.split(":")[0] for line in states.restore("accumulate_rows", tmp_path)]
    assert readers == ["orbax", "flax"]

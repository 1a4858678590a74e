"""The benchmark record says what its JSON files hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.gpu import record


def lines() -> Iterator[list[str]]:
    """The table of runs: encoder, load, one call, torch, ratio, back to back, torch, ratio, share of the floor."""
    known = {name for name, _ in record.FILES.values()}
    for line in (record.RECORD / "README.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 9 and cells[0] in known:
            yield cells


def measured(name: str, load: str) -> list[list[str]]:
    """The same figures of every run of the JSON files that had PyTorch beside it."""
    tower = next(tower for tower, (known, _) in record.FILES.items() if known == name)
    rows = [row for one in record.reports(tower) for row in one["rows"] if row["load"] == load and row.get("torch")]
    return [figures(row) for row in rows]


def figures(row: dict[str, Any]) -> list[str]:
    found = []
    for figure in ("one_call", "back_to_back"):
        torch = min(one[figure] for one in row["torch"].values())
        found += [f"{row['ours'][figure]:.3f}", f"{torch:.3f}", f"{row[figure + '_over_torch']:.2f}"]
    return [*found, f"{row['share_of_floor']:.3f}"]


def test_every_line_of_the_table_of_runs_is_one_of_the_files():
    table = list(lines())
    assert len(table) >= 12
    for name, load, *cells in table:
        words = load.split("(")[0].strip(" *").replace(" ", "").replace(",", "")
        assert cells in measured(name, words), f"{name}, {load}"


def test_the_table_of_targets_is_made_of_the_files():
    text = (record.RECORD / "README.md").read_text(encoding="utf-8")
    assert record.place(text)[1] == record.table(), "make it again: python3 tests/gpu/record.py"


def test_a_target_is_held_from_its_own_value_on_and_not_before():
    assert record.holds(0.64, "at least", 0.64)
    assert not record.holds(0.638, "at least", 0.64)
    assert record.holds(0.68, "at most", 0.68)
    assert not record.holds(0.692, "at most", 0.68)

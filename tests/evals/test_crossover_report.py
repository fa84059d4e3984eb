"""Crossover figures: ratios of rounds, kinds together, bounds, crossovers, what is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.evals.crossover.bench import unequal
from specdec.evals.crossover.labels import labels
from specdec.evals.crossover.loop_run import CellRun, StepTotals
from specdec.evals.crossover.report import crossover_report, streams_table
from specdec.evals.crossover.summary import (
    BEST_FIXED,
    BEST_PEER,
    Cell,
    bounds,
    cell_rows,
    crossovers,
    summary,
    together,
)
from specdec.evals.report.report import ReportFolder

NAMES = ("off", "fixed:4", "adaptive")
PEER, SERVER = "openvino:lookup=5", "http://127.0.0.1:8001"


# --- arithmetic ---


def run_of(speed: float, nodes: float = 0.0) -> CellRun:
    """100 requests' step with that many nodes per request, in which 100 tokens come."""
    totals = StepTotals(1, 100, 0, 100, round(100 * nodes), 0.0, (100, 100 / speed), {"off": 1})
    return CellRun(100, 100 / speed, (), totals)


def peer_of(speed: float) -> CellRun:
    return CellRun(100, 100 / speed, ((0, 3),))


def test_ratios_are_of_rounds_and_the_best_are_the_best_medians() -> None:
    """The machine is four times slower in the second round."""
    speeds = {"off": (40, 10), "fixed:4": (60, 15), "adaptive": (48, 12)}
    runs = {name: [run_of(s) for s in rounds] for name, rounds in speeds.items()}
    runs |= {PEER: [peer_of(24), peer_of(6)], SERVER: [peer_of(16), peer_of(24)]}
    found = cell_rows(Cell("chat", 2), runs, (PEER, SERVER))
    by_name = {row["setting"]: row for row in found}
    assert {(row["best_fixed"], row["best_peer"]) for row in found} == {("fixed:4", SERVER)}
    assert by_name["adaptive"]["over_off"] == 1.2 and by_name["off"]["over_off"] == 1.0
    assert by_name["fixed:4"]["adaptive_over"] == 0.8
    assert by_name[PEER]["adaptive_over"] == 2.0
    assert by_name["adaptive"]["over_best_peer"] == by_name[SERVER]["adaptive_over"] == 1.75
    assert by_name["adaptive"]["tokens_per_second"] == 30.0
    assert (by_name["off"]["min"], by_name["off"]["max"]) == (10.0, 40.0)
    assert by_name["off"]["reasons"] == {"off": 1.0}
    assert (by_name["off"]["parted"], by_name[PEER]["parted"]) == (0, 2)
    assert by_name[PEER]["nodes_per_request"] is by_name[PEER]["reasons"] is None
    (alone,) = cell_rows(Cell("chat", 2), {"adaptive": [run_of(1.0)]})
    assert alone["over_off"] is alone["over_best_peer"] is alone["best_fixed"] is None
    prompts = replace(run_of(1.0), steps=StepTotals(1, 100, 1, 0, 0, 0.0, (0, 0.0), {"off": 1}))
    (row, _) = cell_rows(
        Cell("chat", 2), {"off": [run_of(1.0), prompts], "adaptive": [run_of(1.0)] * 2}
    )
    assert row["decode_tokens_per_second"] is None


@pytest.mark.parametrize(
    ("speed", "failed"), [(1.0, []), (0.98, []), (0.979, ["off"]), (0.9, ["off", "best fixed"])]
)
def test_bounds_are_marked_where_they_fail(speed: float, failed: list[str]) -> None:
    rows = cell_rows(Cell("chat", 2), {"off": [run_of(1.0)], "adaptive": [run_of(speed)]})
    (bound,) = bounds(rows)
    assert bound["reached"] == {"off": speed, BEST_FIXED: speed, BEST_PEER: None}
    assert bound["failed"] == failed


def test_the_best_fixed_and_the_best_peer_have_bounds_of_their_own() -> None:
    runs = {"off": [run_of(1.0)], "fixed:4": [run_of(2.0)], "adaptive": [run_of(1.8)]}
    (bound,) = bounds(cell_rows(Cell("chat", 2), runs))
    assert (bound["best_fixed"], bound["failed"]) == ("fixed:4", [BEST_FIXED])
    peers = {**runs, PEER: [peer_of(1.81)], SERVER: [peer_of(1.0)]}
    (bound,) = bounds(cell_rows(Cell("chat", 2), peers, (PEER, SERVER)))
    assert (bound["best_peer"], bound["failed"]) == (PEER, [BEST_FIXED, BEST_PEER])
    (unknown,) = bounds(cell_rows(Cell("chat", 2), {"adaptive": [run_of(1.0)]}))
    assert unknown["failed"] == []


def test_our_own_server_is_neither_a_peer_nor_a_setting() -> None:
    """It is the fastest here, and nothing is held against it."""
    runs = {"off": [run_of(1.0)], "adaptive": [run_of(1.5)], SERVER: [peer_of(9)]}
    runs[PEER] = [peer_of(0.5)]
    found = summary({Cell("chat", 2): runs}, [PEER], [SERVER])
    assert {(row["best_fixed"], row["best_peer"]) for row in found["rows"]} == {("off", PEER)}
    assert found["bounds"][0]["failed"] == []
    first = found["crossovers"]["chat"]
    assert (first["off_is_as_fast_as"], first["as_fast_as_adaptive"]) == ({}, {PEER: None})


def test_kinds_together_are_geometric_means_with_an_interval_over_kinds() -> None:
    """Gains of 2 and 8 are 4, whatever the speeds; two kinds are too few for an interval."""
    runs = {
        Cell(kind, 4): {"off": [run_of(speed)], "adaptive": [run_of(speed * gain)]}
        for kind, speed, gain in (("a", 1.0, 2.0), ("b", 100.0, 8.0))
    }
    rows = summary(runs)["rows"]
    found = {item["setting"]: item for item in together(rows)}
    assert found["adaptive"]["over_off"] == {"value": 4.0, "low": None, "high": None}
    assert found["off"]["tokens_per_second"] == 10.0
    assert found["adaptive"]["over_best_peer"] is None
    many = {
        Cell(f"kind {n}", 4): {"off": [run_of(1.0)], "adaptive": [run_of(1.5 + n / 10)]}
        for n in range(6)
    }
    (_, adaptive) = together(summary(many)["rows"])
    mean = adaptive["over_off"]
    logs = [math.log(1.5 + n / 10) for n in range(6)]
    assert mean["value"] == pytest.approx(math.exp(sum(logs) / 6), abs=5e-4)
    assert 1.5 < mean["low"] < mean["value"] < mean["high"] < 2.0


def made(kinds: Sequence[str] = ("chat", "random"), peers: bool = False) -> dict[str, Any]:
    """A report of made-up numbers: drafts pay up to 4 streams of chats, and never at random; a
    peer is as fast from 4 streams on."""
    runs = {}
    for kind in kinds:
        for number in (8, 1, 4, 2):  # in any order
            pays = kind != "random" and number <= 4
            fixed = number * {True: 1.5, False: 0.5}[pays]
            sides = {
                "off": [run_of(number)] * 2,
                "fixed:4": [run_of(number if number == 4 else fixed, 4.0)] * 2,
                "adaptive": [run_of(max(number, fixed), (2.0 / number) if pays else 0.4)] * 2,
            }
            if peers:
                sides[PEER] = [peer_of(number / 2)] * 2
                sides[SERVER] = [peer_of(number * (1.5 if number == 4 else 0.7))] * 2
            runs[Cell(kind, number)] = sides
    named = [PEER, SERVER] if peers else []
    return {
        "date": "2026-01-01",
        "machine": {
            "processor": "a processor",
            "cores": 2,
            "capability": "AVX512",
            "versions": {"torch": "2.13"},
        },
        "target": {"model": "toy", "weights": "bf16", "kv": "auto", "backend": "native"},
        "settings": {
            "concurrency": [1, 2, 4, 8],
            "kinds": list(kinds),
            "settings": list(NAMES),
            "peers": named,
            "servers": {SERVER: "vllm 0.32.0"} if peers else {},
            "drafter": "suffix",
            "reason": "suffix gives 1.2x",
            "temperature": 0.0,
            **dict.fromkeys(("max_tokens", "rounds", "node_budget", "token_budget"), 2),
        },
        **summary(runs, named),
        "unequal": [],
    }


def test_a_crossover_is_the_least_concurrency_that_is_crossed() -> None:
    found = made(peers=True)["crossovers"]
    assert found["chat"] == {
        "off_is_as_fast_as": {"fixed:4": 4},  # as fast is enough
        "as_fast_as_adaptive": {PEER: None, SERVER: 4},
        "adaptive": 8,
        "adaptive_nodes": [[1, 2.0], [2, 1.0], [4, 0.5], [8, 0.4]],
    }
    assert found["random"]["off_is_as_fast_as"] == {"fixed:4": 1}
    assert found["random"]["adaptive"] == 1
    rows = [row for row in made()["rows"] if row["kind"] == "chat" and row["concurrency"] < 4]
    never = crossovers(rows)["chat"]
    assert never["off_is_as_fast_as"] == {"fixed:4": None} and never["adaptive"] is None


def test_only_ours_must_answer_as_plain_decoding_does() -> None:
    parted = CellRun(1, 1.0, ((3, 2), (4, 0)))
    untold = replace(parted, parted=None)
    runs = {Cell("chat", 4): {"adaptive": [parted], PEER: [parted], SERVER: [untold]}}
    where = {"kind": "chat", "concurrency": 4, "setting": "adaptive"}
    assert unequal(runs, ["adaptive"]) == [
        {**where, "task": 3, "num_equal": 2},
        {**where, "task": 4, "num_equal": 0},
    ]


# --- what is shown ---


def test_the_report_shows_failures_and_unequal_answers() -> None:
    report = made()
    text = crossover_report(report).text()
    assert "FAILS" not in text and "answers: ours equal" in text and "suffix gives 1.2x" in text
    assert "chat: off is as fast as fixed:4 from 4 streams on\n" in text
    report["bounds"][0]["failed"] = ["off"]
    report["rows"][0]["decode_tokens_per_second"] = None
    report["unequal"] = [{**dict.fromkeys(("kind", "setting"), "x"), "task": 3, "num_equal": 5}]
    report["unequal"][0]["concurrency"] = 4
    text = crossover_report(report).text()
    assert "FAILS" in text and "ANSWERS DIFFER: 1" in text and "answers: ours" not in text


def test_the_streams_table_has_a_row_per_kind_and_one_for_all() -> None:
    found = streams_table(made(peers=True))
    names = ("specdec, no drafts", "specdec, fixed:4", "specdec", PEER, "vllm 0.32.0, server")
    ratios = ("specdec / specdec, no drafts", "specdec / best peer")
    assert found.columns == ("streams", "kind", *names, *ratios)
    assert [row[:2] for row in found.rows] == [
        (number, kind) for number in (1, 2, 4, 8) for kind in ("chat", "random", "all")
    ]
    assert found.rows[6] == (4, "chat", 4, 4, 6, 2, 6, "1.50", "1.00")
    assert found.rows[8][-2:] == ("1.22", "0.82")  # the roots of 1.5 * 1 and 1 * 0.667
    alone = streams_table(made(["chat"]))
    assert alone.columns == ("streams", "kind", *NAMES, "adaptive / off")
    assert {row[1] for row in alone.rows} == {"chat"}


def test_servers_of_one_name_are_told_apart_by_their_addresses() -> None:
    data = made(peers=True)
    other = "http://127.0.0.1:8002"
    data["settings"]["peers"].append(other)
    data["settings"]["servers"][other] = "vllm 0.32.0"
    found = labels(data)
    assert (found[SERVER], found[other]) == (SERVER, other)
    data["settings"]["peers"][1:] = ["ngram"]
    data["settings"]["servers"] = {"ngram": "vllm 0.32.0"}
    assert labels(data)["ngram"] == "ngram"


@pytest.mark.parametrize("kinds", [("chat",), ("chat", "random", "a", "b")])
@pytest.mark.parametrize("peers", [False, True])
def test_the_plots_are_pictures(kinds: tuple[str, ...], peers: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report = made(kinds, peers)
    report["bounds"][0]["failed"] = ["off"]
    ReportFolder(tmp_path, "crossover").write(crossover_report(report))
    pictures = {file.name for file in tmp_path.glob("*.png")}
    assert pictures == {
        f"crossover-{name}.png" for name in ("throughput", "gain", "nodes", *["ahead"] * peers)
    }
    for name in pictures:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")

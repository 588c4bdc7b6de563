"""A benchmark changes no committed file; asked to keep its result, it puts it into the docs."""

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import distribution
from pathlib import Path
from statistics import mean
from typing import Any

import psutil
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import harness
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import turns
from benchmarks.gpu.recipes import RECIPES
from benchmarks.models import MODEL_VARIABLE
from scripts.write_reference import benchmarks_page
from tests.conftest import ROOT
from tests.waiting import WAIT_SECONDS, wait_until

EXAMPLE = """
import sys
from benchmarks.harness import at_most, record

def main():
    record(
        "example_of_two", [2.0, 4.0, 6.0], [2.0], "s", "a peer", "lower", ["numpy"],
        {"a limit": at_most(4, 5, "s")}, table=[["size", "seconds"], [1, 2.0]],
    )
    sys.exit(sys.argv[1:2] == ["fail"])

main()
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with one benchmark, of which an older result is committed."""
    for name in ("__init__", "__main__", "harness"):
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        shutil.copy(ROOT / "benchmarks" / f"{name}.py", tmp_path / "benchmarks")
    (tmp_path / "benchmarks" / "example.py").write_text(EXAMPLE)
    results = tmp_path / "benchmarks" / "results"
    results.mkdir()
    older = json.loads((ROOT / "benchmarks" / "results" / "train_cpu.json").read_text())
    (results / "example_of_two.json").write_text(json.dumps(older | {"name": "example_of_two"}))
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "benchmarks.md").write_text(benchmarks_page(tmp_path / "benchmarks"))
    return tmp_path


def bench(checkout: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-B", "-m", "benchmarks", *arguments]
    return subprocess.run(
        command, cwd=checkout, capture_output=True, text=True, timeout=WAIT_SECONDS
    )


def committed(checkout: Path) -> dict[str, str]:
    """The text of every file that git does not ignore."""
    paths = [path for path in checkout.rglob("*") if path.is_file()]
    ignored = {".llm_assets", "__pycache__"}
    inside = [path for path in paths if ignored.isdisjoint(path.parts)]
    return {str(path.relative_to(checkout)): path.read_text() for path in inside}


def test_a_run_changes_no_committed_file(checkout: Path) -> None:
    before = committed(checkout)
    done = bench(checkout, "example")
    assert done.returncode == 0, done.stderr
    assert committed(checkout) == before
    written = checkout / ".llm_assets/benchmarks/results/example/example_of_two.json"
    assert str(written.relative_to(checkout)) in done.stdout
    ignored = ["git", "check-ignore", "-q", str(written.relative_to(checkout))]
    assert subprocess.run(ignored, cwd=ROOT).returncode == 0
    result = json.loads(written.read_text())
    assert (result["ours"], result["ratio"]) == (4.0, 0.5)
    assert result["command"] == "make bench NAME=example"


def test_a_result_is_kept_with_its_machine_and_the_page_is_written(checkout: Path) -> None:
    before = committed(checkout)
    done = bench(checkout, "example", "--keep")
    assert done.returncode == 0, done.stderr
    after = committed(checkout)
    page, result = "docs/benchmarks.md", "benchmarks/results/example_of_two.json"
    table = result.replace("json", "csv")
    assert {name for name in after if after[name] != before.get(name)} == {page, result, table}
    assert json.loads(after[result])["machine"] == harness.machine_name()
    assert f"`make bench NAME=example` on {harness.machine_name()}" in after[page]
    assert "| s | 4 | 2 | **0.50** |" in after[page]
    assert after[table] == "size,seconds\n1,2.0\n"


def test_nothing_is_kept_of_a_benchmark_that_failed(checkout: Path) -> None:
    before = committed(checkout)
    assert bench(checkout, "example", "--keep", "fail").returncode == 1
    assert committed(checkout) == before


def test_an_unknown_name_is_refused_with_those_there_are(checkout: Path) -> None:
    done = bench(checkout, "exmaple")
    assert done.returncode == 2
    assert "'exmaple'" in done.stderr and "{example}" in done.stderr


@pytest.mark.soak
def test_the_curves_of_knowledge_go_on_after_a_kill_and_each_point_is_a_training_of_its_own(
    checkout: Path, tiny_model_folder: Path
) -> None:
    shutil.copytree(ROOT / "benchmarks", checkout / "benchmarks", dirs_exist_ok=True)
    shutil.copytree(ROOT / "config", checkout / "config")
    shutil.copy(ROOT / "dagster.yaml", checkout)
    home = checkout / ".llm_assets" / "benchmarks"

    def points() -> dict[str, tuple[float, dict[str, Any]]]:
        """Name to when it was written, and its figures."""
        found = home.glob("knowledge/*/points/*.json")
        return {file.stem: (file.stat().st_mtime, json.loads(file.read_text())) for file in found}

    def start(tokens: str) -> "subprocess.Popen[bytes]":
        plan = {"BENCH_SEEDS": "1", "BENCH_TOKENS": tokens, MODEL_VARIABLE: str(tiny_model_folder)}
        command = [sys.executable, "-B", "-m", "benchmarks", "knowledge"]
        environment = os.environ | plan
        return subprocess.Popen(command, cwd=checkout, env=environment, start_new_session=True)

    first = start("2000,4000")
    while not points() and first.poll() is None:
        time.sleep(0.1)
    # The second point is being prepared, trained or measured.
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    kept = points()
    assert list(kept) == ["raw-0-2000"] and not list(home.glob("results/knowledge/*"))

    assert start("2000,4000").wait() == 0
    whole = points()
    assert whole.keys() == {f"{t}-0-{n}" for t in ("raw", "forms", "mix") for n in (2000, 4000)}
    assert whole["raw-0-2000"] == kept["raw-0-2000"]
    for _, point in whole.values():
        for condition in ("closed_book", "retrieval", "passage", "placebo"):
            assert 0 <= point["metrics"][f"exam_{condition}_acc"]["candidate"]["value"] <= 1
        assert point["exam"]["facts"] == 48
    result = json.loads((home / "results/knowledge/knowledge.json").read_text())
    assert len(result["rounds"]["ours"]) == 1 and len(result["checks"]) == 4
    with (home / "results/knowledge/knowledge.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [(row["text"], row["tokens"]) for row in table] == [
        (text, tokens) for tokens in ("2000", "4000") for text in ("raw", "forms", "mix")
    ]
    assert not list(home.glob("knowledge/*/runs/*")), "the trainings' states are removed"

    (path,) = home.glob("knowledge/*/points/mix-0-4000.json")
    path.unlink()
    assert start("4000").wait() == 0
    again = json.loads(path.read_text())
    assert again["weights"] == whole["mix-0-4000"][1]["weights"], "not from the run before it"


def test_a_part_of_the_gpu_kit_says_what_each_of_its_runs_came_to() -> None:
    def fail(left: float) -> None:
        raise RuntimeError("no memory")

    kept: list[dict[str, Any]] = []
    runs = {"first": fail, "second": lambda left: 2}
    done = turns.in_turn(runs, math.inf, lambda found: kept.append(dict(found)))
    assert done == {"first": {"failed": "no memory"}, "second": 2}
    assert kept == [{"first": {"failed": "no memory"}}, done]
    # The first run takes more time than there is, so none is left for the second.
    soon = time.monotonic() - turns.BEGAN + 2.0
    long = {"first": lambda left: time.sleep(left + 0.1), "second": lambda left: 2}
    late = turns.in_turn(long, soon, kept.append)
    assert late["first"] is None and "left_out" in late["second"]
    assert turns.in_turn(runs, math.inf, kept.append, only=["second"]) == {"second": 2}
    with pytest.raises(SystemExit, match="there is no run third; there are first, second"):
        turns.in_turn(runs, math.inf, kept.append, only=["third"])


def test_one_run_of_a_part_is_added_to_what_the_part_found_before_on_that_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = iter(range(9))
    runs = dict.fromkeys(("first", "second"), lambda left: next(numbers))
    monkeypatch.setitem(
        gpu.PARTS,
        "changes",
        lambda seconds, keep, only: turns.in_turn(runs, math.inf, keep, only),
    )

    def measure(*arguments: str) -> Any:
        given = ["gpu", *arguments, "--here", "--results", str(tmp_path)]
        monkeypatch.setattr(sys, "argv", given)
        with pytest.raises(SystemExit) as ended:
            gpu.main()
        return ended.value.code

    assert measure("changes") == measure("changes", "--only", "second") == 0
    path = tmp_path / "changes.json"
    assert json.loads(path.read_text())["found"] == {"first": 0, "second": 2}
    assert measure("resume", "--only", "second") == 2
    assert "--only picks a run of one part: trainer, peer, changes" in capsys.readouterr().err
    path.write_text(json.dumps({"machine": {"device": "another"}, "found": {}}))
    assert "is of another machine" in measure("changes", "--only", "second")


@pytest.mark.soak
def test_a_part_of_the_gpu_kit_ends_with_the_program_that_was_told_to_end(tmp_path: Path) -> None:
    """`timeout make gpu` left one on the GPU that nobody saw."""
    command = [sys.executable, "-m", "benchmarks.gpu", "resume", "--results", str(tmp_path)]
    kit = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert kit.stdout is not None
    assert any(line.startswith("== resume") for line in kit.stdout)
    wait_until(psutil.Process(kit.pid).children)
    children = psutil.Process(kit.pid).children()
    kit.terminate()
    assert kit.wait(WAIT_SECONDS) != 0
    _, alive = psutil.wait_procs(children, WAIT_SECONDS)
    assert not alive and not list(tmp_path.iterdir()), "it came to its own end"


def test_results_of_a_gpu_are_kept_and_a_rehearsals_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, kept = tmp_path / "results", tmp_path / "kept"
    results.mkdir()
    monkeypatch.setattr(gpu, "KEPT", kept)
    with pytest.raises(SystemExit, match="holds no results"):
        gpu.keep(results)
    of_a_gpu = {"device": "NVIDIA H200", "cuda": "13.0"}
    (results / "peer.json").write_text(json.dumps({"machine": of_a_gpu, "found": {"1b": 1}}))
    gpu.keep(results)
    assert (kept / "peer.json").read_bytes() == (results / "peer.json").read_bytes()
    (results / "peer.json").write_text(json.dumps({"machine": gpu.machine(), "found": {}}))
    with pytest.raises(SystemExit, match="as a rehearsal"):
        gpu.keep(results)
    assert json.loads((kept / "peer.json").read_text())["machine"] == of_a_gpu


def python_with_torch_alone(folder: Path) -> Path:
    """An interpreter that finds of this environment torch and what torch itself needs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    waiting, met = ["torch"], set()
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in met:
            continue
        met.add(name)
        package = distribution(name)
        waiting += [
            needed.name
            for needed in map(Requirement, package.requires or [])
            if not needed.marker or needed.marker.evaluate({"extra": ""})
        ]
        for top in {file.parts[0] for file in package.files or [] if file.parts[0] != ".."}:
            if top != "__pycache__" and not (packages / top).exists():
                (packages / top).symlink_to(str(package.locate_file(top)))
    return folder / "bin" / "python"


@pytest.mark.soak
def test_the_first_hour_on_a_gpu_is_rehearsed_with_torch_alone_and_without_a_network(
    tmp_path: Path,
) -> None:
    kit = subprocess.run(["make", "gpu-kit"], cwd=ROOT, capture_output=True, text=True)
    assert kit.returncode == 0, kit.stderr
    assert sum(file.stat().st_size for file in (ROOT / "gpu-kit").iterdir()) <= 50 * 2**20
    checkout, results = tmp_path / "checkout", tmp_path / "results"
    subprocess.run(["git", "clone", "--quiet", ROOT, checkout], check=True)
    python = python_with_torch_alone(tmp_path / "bare")
    make = ["make", "gpu", f"PYTHON={python}", f"OUT={results}"]
    alone = ["unshare", "--net", "--map-root-user", "env", "-i", f"PATH={os.environ['PATH']}"]
    without = subprocess.run([*alone, *make], cwd=checkout, capture_output=True, text=True)
    assert without.returncode != 0 and "make gpu-kit PYTHONS=3." in without.stderr
    shutil.copytree(ROOT / "gpu-kit", checkout / "gpu-kit")
    # PEFT, where the machine has it, makes transformers import what no part of the kit needs.
    (archive,) = (ROOT / "gpu-kit").glob("3.*")
    unpacked = tmp_path / "unpacked"
    subprocess.run([python, "-m", "tarfile", "--extract", archive, unpacked], check=True)
    peft = [python, "-c", "from transformers import AutoTokenizer, PreTrainedModel"]
    subprocess.run(peft, env={"PYTHONPATH": str(unpacked)}, check=True)
    ended = subprocess.run([*alone, *make], cwd=checkout, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {
        part: json.loads((results / f"{part}.json").read_text())["found"]
        for part in ("probe", "resume", "trainer", "peer", "changes", "recipes")
    }
    assert found["resume"]["largest_relative_difference_of_a_loss"] == 0
    took = re.findall(r"^== (\w+): (\d+) s$", ended.stdout, re.MULTILINE)
    assert [part for part, _ in took] == list(found)
    assert all(int(seconds) <= turns.SECONDS for _, seconds in took)
    # A machine that is busy with other work may have no time for the last of some runs.
    assert "left_out" not in found["peer"] and len(found["changes"]) == 6
    assert found["recipes"].keys() == set(RECIPES)
    assert all(
        one["float32, largest relative difference"] == 0 for one in found["recipes"].values()
    )
    alone_again = [*make, "PARTS=changes --only float8"]
    again = subprocess.run([*alone, *alone_again], cwd=checkout, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    changes = json.loads((results / "changes.json").read_text())["found"]
    assert len(changes) == 6 and changes["float8"]["profile"]["most"]
    refused = [sys.executable, "-m", "benchmarks.gpu", "--keep", "--results", str(results)]
    kept = subprocess.run(refused, cwd=ROOT, capture_output=True, text=True)
    assert kept.returncode == 1 and "as a rehearsal" in kept.stderr


def test_the_page_about_knowledge_shows_the_figures_that_were_measured() -> None:
    with (ROOT / "benchmarks/results/knowledge.csv").open() as file:
        rows = list(csv.DictReader(file))
    page = (ROOT / "docs/knowledge.md").read_text()

    def share(column: str, **chosen: str) -> str:
        values = [float(row[column]) for row in rows if chosen.items() <= row.items()]
        return f"{mean(values):.0%}"

    for tokens in ("12000", "25000", "50000", "100000"):
        closed_book = "exam_closed_book_acc_candidate"
        shares = [share(closed_book, text=text, tokens=tokens) for text in ("raw", "forms", "mix")]
        assert f"| {int(tokens):,} | {' | '.join(shares)} |" in page
    base, found = share("exam_closed_book_acc_base"), share("exam_retrieval_acc_base")
    assert f"(the base model answers {base}, or {found} with a retrieved passage)" in page

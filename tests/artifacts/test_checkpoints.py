"""Checkpoints: what exists, what is damaged, what is kept."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from artifacts import checkpoints
from artifacts.errors import DamagedArtifact, UserError
from tests.damage import cut, flip_bit

Change = Callable[[Path], None]
CONTENT = {"settings": {"steps": 8}, "inputs": {"base_model": "abc"}}


@pytest.fixture
def lines() -> list[str]:
    """What was reported."""
    return []


def save(run: Path, step: int, permanent: bool = False) -> None:
    folder = Path(checkpoints.clear_step(str(run), step))
    (folder / "weights").write_bytes(bytes([step]) * 100)
    checkpoints.commit(str(run), step, CONTENT, {"samples_seen": step * 4}, permanent)


def newest(run: Path, lines: list[str]) -> int | None:
    found = checkpoints.find_newest(str(run), CONTENT, lines.append)
    return found.manifest.step if found else None


def test_the_newest_is_found_by_number_not_by_name(tmp_path: Path, lines: list[str]) -> None:
    assert newest(tmp_path / "absent", lines) is None
    for step in (2, 10, 9):
        save(tmp_path, step)
    assert newest(tmp_path, lines) == 10
    assert lines == []


@pytest.mark.fault(
    "checkpoint", "resumable state: {damage}", sees="the step", then="the previous state is used"
)
@pytest.mark.parametrize(
    ("damage", "file", "change", "said"),
    [
        ("flipped bit", "weights", flip_bit, "step-2/weights has another checksum"),
        ("truncated", "weights", cut, "step-2/weights has 50 bytes, not 100"),
        ("absent", "weights", Path.unlink, "step-2/weights is absent"),
        ("no manifest", "manifest.json", Path.unlink, "was not finished"),
        ("half a manifest", "manifest.json", cut, "step-2/manifest.json cannot be read"),
    ],
)
def test_damage_is_named_and_the_one_before_is_taken(
    tmp_path: Path, lines: list[str], damage: str, file: str, change: Change, said: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    change(tmp_path / "step-2" / file)

    assert newest(tmp_path, lines) == 1
    (line,) = lines
    assert "step 2 " in line and said in line


@pytest.mark.fault(
    "checkpoint",
    "one number changed in a resumable state's manifest",
    sees="the step, and that it was changed",
    then="the previous state is used",
)
@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_changed_number_in_the_state_is_noticed(
    tmp_path: Path, lines: list[str], has_checksum: bool
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = tmp_path / "step-2" / "manifest.json"
    fields = json.loads(path.read_text().replace('"samples_seen": 8', '"samples_seen": 9'))
    if not has_checksum:
        del fields["checksum"]
    path.write_text(json.dumps(fields))

    assert newest(tmp_path, lines) == 1
    fault = "was changed after it was written" if has_checksum else "has no checksum"
    assert f"step-2/manifest.json cannot be read (it {fault}" in lines[0]


def test_content_of_another_form_is_damage(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 1)
    folder = Path(checkpoints.clear_step(str(tmp_path), 2))
    (folder / "weights").touch()
    checkpoints.commit(str(tmp_path), 2, CONTENT | {"of_a_later_version": 1}, {})

    assert newest(tmp_path, lines) == 1
    (line,) = lines
    assert "step 2 is damaged" in line and "cannot be read (of_a_later_version: " in line


@pytest.mark.fault(
    "checkpoint",
    "every resumable state damaged",
    sees="that nothing is left to resume from, and `llm-assets doctor --repair`",
    then="training starts over only after that command",
)
def test_a_run_begins_again_only_when_told_to(tmp_path: Path, lines: list[str]) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-1" / "weights").write_bytes(b"")
    with pytest.raises(DamagedArtifact, match=r"Every checkpoint .* doctor --repair && dagster"):
        newest(tmp_path, lines)


def test_another_runs_checkpoint_is_refused_saying_what_differs(
    tmp_path: Path, lines: list[str]
) -> None:
    save(tmp_path, 1)
    other = {"settings": {"steps": 9}, "inputs": {"base_model": "xyz"}}
    with pytest.raises(UserError) as refusal:
        checkpoints.find_newest(str(tmp_path), other, lines.append)
    assert "settings.steps: 8 -> 9" in str(refusal.value)
    assert "inputs.base_model: abc -> xyz" in str(refusal.value)


def test_rotation_keeps_the_newest_and_the_permanent_ones(tmp_path: Path) -> None:
    (tmp_path / "step-0" / "unfinished").mkdir(parents=True)
    assert checkpoints.rotate(str(tmp_path), keep=1) == [], "before the first one"
    for step in range(1, 8):
        save(tmp_path, step, permanent=step % 3 == 0)

    removed = checkpoints.rotate(str(tmp_path), keep=2)

    assert sorted(removed) == [0, 1, 2, 4]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-3",
        "step-5",
        "step-6",
        "step-7",
    ]

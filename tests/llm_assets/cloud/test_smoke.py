"""The smallest batch and jobs, as real processes behind the stand-ins."""

import sys
from pathlib import Path
from typing import Any

import pytest

from artifacts.program.entry import SmokeSpec
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.setup.rights import Finding
from llm_assets.cloud.spending import estimate_smoke
from llm_assets.config import TrainingPlace
from llm_assets.runners.smoke import check_serving, describe, smoke
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, SERVE_IMAGE, LocalGoogle
from tests.stand_ins.mount import FuseMount
from tests.stand_ins.processes import LocalImage
from tests.stand_ins.project import L4, cloud_settings, cuda_image, write_cloud
from tests.stand_ins.serve_image import vllm_image

VERSIONS = {"python": "3.11.2", "torch": "2.13.0+cu126", "cuda": "12.6"}
JOB: dict[str, Any] = {**VERSIONS, "bucket": True, "accelerators": 1}


@pytest.mark.soak
def test_smallest_batch_and_job_say_what_they_found(google: LocalGoogle, tmp_path: Path) -> None:
    content = cloud_settings(google) | {"secrets": {"weights_and_biases_key": "tracking"}}
    google.secrets.values["tracking"] = "hush-hush"
    path = write_cloud(tmp_path, content)
    google.images[CUDA_IMAGE] = cuda_image()
    settings = GoogleCloudSettings.model_validate(content)
    findings = list(smoke(settings, path, nodes=2))
    assert [finding.text for finding in findings if not finding.ok] == []
    assert [f.key for f in findings] == [
        *("images.spark", "images.spark", "bucket", "cost"),
        *("images.cuda", "evaluation", "bucket", "secrets", "evaluation", "cost"),
        *("images.serve", "images.serve", "cost"),
    ]
    told = [finding.text for finding in findings]
    assert "`mapInArrow` and a join over a shuffle work" in told
    assert "a training step of 2 process(es) is right" in told
    assert "answers, by this project's own" in told
    job, _ = google.vertex.jobs()
    assert [pool.replica_count for pool in job.job_spec.worker_pool_specs] == [1, 1]
    assert told[-1].endswith(" USD") and sum("it has cost 0.0" in text for text in told) == 3
    assert "hush-hush" not in str(findings)
    # Without FUSE a machine's view of the bucket is a copy, an ordinary folder.
    mounted = isinstance(google.mount, FuseMount)
    assert ("renames no folders" if mounted else "renames folders") in findings[6].text


@pytest.mark.parametrize("runner", ["google_cloud", "google_batch"])
def test_image_that_cannot_be_pulled_is_a_finding(
    google: LocalGoogle, tmp_path: Path, runner: TrainingPlace
) -> None:
    content = cloud_settings(google)
    content["images"] = {name: f"{image}-missing" for name, image in content["images"].items()}
    path = write_cloud(tmp_path, content)
    found = list(smoke(GoogleCloudSettings.model_validate(content), path, runner=runner))
    assert bool(google.vertex.jobs()) == (runner == "google_cloud"), "the pipeline's runner trains"
    assert [(finding.key, finding.ok) for finding in found] == [
        ("images.spark", False),
        ("images.cuda", False),
    ]
    assert all("images/build.sh" in finding.text for finding in found)


@pytest.mark.parametrize(
    ("key", "found", "told", "ok"),
    [
        ("images.cuda", {"secrets": []}, ("secrets", "reads no secret"), True),
        ("images.cuda", {"shows_uploaded": False}, ("bucket", "hides what was uploaded"), False),
        ("images.cuda", {"bucket": False}, ("bucket", "lost what was just written"), False),
        ("images.cuda", {"accelerators": 0}, ("evaluation", "0 accelerators are seen"), False),
        ("images.serve", {"engine": "python"}, ("endpoint.vllm", "instead of vLLM"), False),
    ],
    ids=["no secret", "hidden upload", "lost file", "accelerators", "engine"],
)
def test_what_a_job_found_is_told(
    google: LocalGoogle, key: str, found: dict[str, Any], told: tuple[str, str], ok: bool
) -> None:
    content = cloud_settings(google) | {"evaluation": L4}
    content["endpoint"] |= L4
    settings = GoogleCloudSettings.model_validate(content)
    findings = list(describe(key, JOB | found, settings))
    assert "starts, with Python 3.11.2, torch 2.13.0+cu126, cuda 12.6" in findings[0].text
    wanted = [finding for finding in findings if (finding.key, finding.ok) == (told[0], ok)]
    assert any(told[1] in finding.text for finding in wanted)
    assert ok or [finding for finding in findings if not finding.ok] == wanted


def test_job_whose_result_never_reached_the_bucket_is_not_taken_as_done(
    google: LocalGoogle, tmp_path: Path
) -> None:
    content = cloud_settings(google)
    content["images"]["spark"] += "-missing"
    writes_nothing = "import artifacts.program.entry as p\nwith p.open_session(): pass"
    google.images[CUDA_IMAGE] = LocalImage(entrypoint=(sys.executable, "-c", writes_nothing))
    path = write_cloud(tmp_path, content)
    *_, job = smoke(GoogleCloudSettings.model_validate(content), path)
    assert job.key == "images.cuda" and job.ok is False
    assert "ended well, but left no gs://" in job.text and "starts again" in job.text


def check_vllm(google: LocalGoogle, folder: Path, vllm: dict[str, object]) -> list[Finding]:
    """What the serve image says of an endpoint's arguments, in a job of its own."""
    content = cloud_settings(google)
    content["endpoint"] |= {**L4, "vllm": vllm}
    path = write_cloud(folder, content)
    google.images[SERVE_IMAGE] = vllm_image()
    settings = GoogleCloudSettings.model_validate(content)
    spec = SmokeSpec(output=f"gs://{BUCKET}/smoke/{folder.name}")
    return [finding for finding in check_serving(spec, settings, path) if finding.key != "cost"]


def test_vllms_own_parser_is_asked_about_the_endpoints_arguments(
    google: LocalGoogle, tmp_path: Path
) -> None:
    starts, takes = check_vllm(google, tmp_path, {"max_model_len": 4096})
    assert starts.ok and "vllm 0.32.0" in starts.text
    assert takes == Finding("endpoint.vllm", True, "vLLM 0.32.0 takes its arguments")
    (job,) = google.vertex.jobs()
    machine = job.job_spec.worker_pool_specs[0].machine_spec
    assert machine.machine_type == "g2-standard-8", "the evaluation has no accelerators here"
    (log,) = google.vertex.logs(job.name).values()
    assert "Traceback" not in log


def test_arguments_that_vllm_refuses_are_told_in_its_words(
    google: LocalGoogle, tmp_path: Path
) -> None:
    vllm = {"arguments": ["--no-such", "thing"]}
    _, refused = check_vllm(google, tmp_path, vllm)
    assert (refused.key, refused.ok) == ("endpoint.vllm", False)
    assert "unrecognized arguments: --no-such thing" in refused.text
    assert "Correct `arguments`" in refused.text


def test_price_of_every_job_is_said(google: LocalGoogle) -> None:
    content = cloud_settings(google)
    content["endpoint"] |= L4
    settings = GoogleCloudSettings.model_validate(content)
    _, job, parser = estimate_smoke(settings)
    _, two, _ = estimate_smoke(settings, nodes=2)
    assert job.dollars and two.dollars == 2 * job.dollars
    assert parser.stage == "a job on g2-standard-8" and parser.dollars and parser.dollars < 0.5
    on_gpus = GoogleCloudSettings.model_validate(content | {"evaluation": L4})
    assert all(e.dollars and e.dollars < 0.5 for e in estimate_smoke(on_gpus))

"""The smallest batch and job, as real processes behind the stand-ins."""

from pathlib import Path

import yaml

from llm_assets.cloud.estimate import estimate_smoke
from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.runners.smoke import describe, smoke
from tests.stand_ins.google import CUDA_IMAGE, LocalGoogle
from tests.stand_ins.project import cloud_settings, cuda_image

JOB = {"python": "3.11.2", "torch": "2.13.0+cu126", "cuda": "12.6", "bucket": True}


def test_smallest_batch_and_job_say_what_they_found(google: LocalGoogle, tmp_path: Path) -> None:
    path = tmp_path / "google_cloud.yaml"
    content = cloud_settings(google) | {"secrets": {"weights_and_biases_key": "tracking"}}
    google.secrets.values["tracking"] = "hush-hush"
    path.write_text(yaml.safe_dump(content))
    google.images[CUDA_IMAGE] = cuda_image()
    settings = GoogleCloudSettings.model_validate(content)
    findings = list(smoke(settings, path))
    assert [finding.text for finding in findings if not finding.ok] == []
    assert [f.key for f in findings] == [
        *("images.spark", "bucket", "images.cuda", "bucket", "secrets", "evaluation")
    ]
    assert "hush-hush" not in str(findings)
    assert "renames no folders" in findings[3].text, "as in a flat bucket"


def test_image_that_cannot_be_pulled_is_a_finding(google: LocalGoogle, tmp_path: Path) -> None:
    content = cloud_settings(google)
    content["images"] = {name: f"{image}-missing" for name, image in content["images"].items()}
    path = tmp_path / "google_cloud.yaml"
    path.write_text(yaml.safe_dump(content))
    found = list(smoke(GoogleCloudSettings.model_validate(content), path))
    assert [(finding.key, finding.ok) for finding in found] == [
        ("images.spark", False),
        ("images.cuda", False),
    ]
    assert all("images/build.sh" in finding.text for finding in found)


def test_mount_that_hides_what_was_uploaded_is_a_problem(google: LocalGoogle) -> None:
    settings = GoogleCloudSettings.model_validate(cloud_settings(google))
    found = JOB | {"accelerators": 0, "shows_uploaded": False}
    (problem,) = [f for f in describe("images.cuda", found, settings) if not f.ok]
    assert problem.key == "bucket" and "hides what was uploaded" in problem.text


def test_accelerators_that_are_not_seen_are_a_problem(google: LocalGoogle) -> None:
    machines = {"accelerator_type": "NVIDIA_L4", "accelerator_count": 1}
    content = cloud_settings(google) | {"evaluation": machines | {"machine_type": "g2-standard-8"}}
    settings = GoogleCloudSettings.model_validate(content)
    seen = list(describe("images.cuda", JOB | {"accelerators": 0}, settings))
    assert [finding.key for finding in seen if not finding.ok] == ["evaluation"]
    assert "cuda 12.6" in seen[0].text
    batch, job = estimate_smoke(settings)
    assert batch.dollars and batch.dollars < 0.5 and job.dollars and job.dollars < 0.5

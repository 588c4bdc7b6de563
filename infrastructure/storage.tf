resource "google_storage_bucket" "bucket" {
  name                        = "${var.project}-llm-assets"
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 24 * 3600
  }

  # Jobs talk to Dagster through small files, and are given their specs.
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 30
      matches_prefix = ["pipes/", "jobs/", "smoke/", "builds/"]
    }
  }

  # Parts of interrupted uploads.
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      age            = 7
      matches_prefix = ["store/uploads/"]
    }
  }

  depends_on = [google_project_service.apis]
}

resource "google_artifact_registry_repository" "images" {
  repository_id = "llm-assets"
  location      = var.region
  format        = "DOCKER"

  # The newest of each image stay, however old: a version that serves may be made of one.
  cleanup_policies {
    id     = "newest"
    action = "KEEP"
    most_recent_versions {
      keep_count = 10
    }
  }
  cleanup_policies {
    id     = "old"
    action = "DELETE"
    condition {
      older_than = "180d"
    }
  }

  depends_on    = [google_project_service.apis]
}

# Its value is added by hand, so that it is in no state file:
#   printf '%s' "$HF_TOKEN" | gcloud secrets versions add hugging-face-token --data-file=-
resource "google_secret_manager_secret" "hugging_face_token" {
  secret_id = "hugging-face-token"
  replication {
    user_managed {
      replicas {
        location = var.region
      }
    }
  }
  depends_on = [google_project_service.apis]
}

# The same; for `secrets.weights_and_biases_key`, where trainings are followed in Weights & Biases:
#   printf '%s' "$WANDB_API_KEY" | gcloud secrets versions add weights-and-biases-key --data-file=-
resource "google_secret_manager_secret" "weights_and_biases_key" {
  secret_id = "weights-and-biases-key"
  replication {
    user_managed {
      replicas {
        location = var.region
      }
    }
  }
  depends_on = [google_project_service.apis]
}

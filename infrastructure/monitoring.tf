resource "google_vertex_ai_tensorboard" "tensorboard" {
  display_name = "llm-assets"
  region       = var.region
  depends_on   = [google_project_service.apis]
}

# The logs of batches, jobs and endpoints, for longer than the 30 days of the default bucket.
resource "google_logging_project_bucket_config" "logs" {
  project        = var.project
  location       = var.region
  bucket_id      = "llm-assets"
  retention_days = 90
  depends_on     = [google_project_service.apis]
}

resource "google_logging_project_sink" "logs" {
  name                   = "llm-assets"
  destination            = "logging.googleapis.com/${google_logging_project_bucket_config.logs.id}"
  filter                 = "resource.type=(\"cloud_dataproc_batch\" OR \"ml_job\" OR \"aiplatform.googleapis.com/Endpoint\") OR log_id(\"batch_task_logs\") OR log_id(\"gcplogs-docker-driver\")"
  unique_writer_identity = true
}

resource "google_billing_budget" "budget" {
  provider        = google.budget
  count           = var.billing_account == "" ? 0 : 1
  billing_account = var.billing_account
  display_name    = "llm-assets"
  budget_filter {
    projects = ["projects/${data.google_project.project.number}"]
  }
  amount {
    specified_amount {
      units = tostring(var.monthly_budget)
    }
  }
  dynamic "threshold_rules" {
    for_each = [0.5, 0.9, 1.0]
    content {
      threshold_percent = threshold_rules.value
    }
  }
}

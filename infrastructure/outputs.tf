# What `llm-assets setup` reads: keys of config/google_cloud.yaml, and where the images are.

output "settings" {
  description = "Keys of config/google_cloud.yaml."
  value = {
    project         = var.project
    region          = var.region
    bucket          = google_storage_bucket.bucket.name
    service_account = google_service_account.jobs.email
    serving_account = google_service_account.serving.email
    builder_account = google_service_account.builder.email
    subnetwork      = google_compute_subnetwork.subnetwork.id
    tensorboard     = google_vertex_ai_tensorboard.tensorboard.name
  }
}

output "control" {
  description = "The UI and the board of the machine that runs Dagster, at this machine's ports 3000 and 8012."
  value = var.control ? join(" ", [
    "gcloud compute ssh ${google_compute_instance.control[0].name} --tunnel-through-iap",
    "--project=${var.project} --zone=${local.control_zone}",
    "-- -N -L 3000:127.0.0.1:3000 -L 8012:127.0.0.1:8012",
  ]) : "set control = true"
}

output "repository" {
  description = "Where images are pushed: a prefix of their names."
  value       = "${var.region}-docker.pkg.dev/${var.project}/${google_artifact_registry_repository.images.repository_id}"
}

output "secret" {
  description = "Secret for the Hugging Face token."
  value       = google_secret_manager_secret.hugging_face_token.secret_id
}

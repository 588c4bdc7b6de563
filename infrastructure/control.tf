# The machine that runs Dagster. It has no external address: people reach it by Identity-Aware Proxy,
# and it reaches Google's APIs and image repositories privately, all else by Cloud NAT. Container-Optimized
# OS runs what control.yaml says: PostgreSQL, and the image `control` as soon as images/build.sh has pushed
# it. All that both keep is on a disk of its own, of which there is a snapshot for each day.

resource "google_service_account" "control" {
  account_id   = "llm-assets-control"
  display_name = "Dagster of llm-assets"
  depends_on   = [google_project_service.apis]
}

# PostgreSQL comes from Docker Hub through here, where it stays when Docker Hub does not answer.
resource "google_artifact_registry_repository" "docker_hub" {
  count         = var.control ? 1 : 0
  repository_id = "docker-hub"
  location      = var.region
  format        = "DOCKER"
  mode          = "REMOTE_REPOSITORY"
  remote_repository_config {
    docker_repository {
      public_repository = "DOCKER_HUB"
    }
  }
  depends_on = [google_project_service.apis]
}

resource "google_artifact_registry_repository_iam_member" "docker_hub" {
  count      = var.control ? 1 : 0
  location   = google_artifact_registry_repository.docker_hub[0].location
  repository = google_artifact_registry_repository.docker_hub[0].name
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.control.member
}

resource "google_compute_disk" "state" {
  count      = var.control ? 1 : 0
  name       = "llm-assets-state"
  zone       = local.control_zone
  type       = "pd-balanced"
  size       = 50
  depends_on = [google_project_service.apis]
  lifecycle {
    prevent_destroy = true
  }
}

resource "google_compute_resource_policy" "snapshots" {
  count  = var.control ? 1 : 0
  name   = "llm-assets-state"
  region = var.region
  snapshot_schedule_policy {
    schedule {
      daily_schedule {
        days_in_cycle = 1
        start_time    = "04:00"
      }
    }
    retention_policy {
      max_retention_days    = 14
      on_source_disk_delete = "KEEP_AUTO_SNAPSHOTS"
    }
  }
  depends_on = [google_project_service.apis]
}

resource "google_compute_disk_resource_policy_attachment" "snapshots" {
  count = var.control ? 1 : 0
  name  = google_compute_resource_policy.snapshots[0].name
  disk  = google_compute_disk.state[0].name
  zone  = local.control_zone
}

resource "google_compute_instance" "control" {
  count                     = var.control ? 1 : 0
  name                      = "llm-assets-control"
  zone                      = local.control_zone
  machine_type              = var.control_machine_type
  allow_stopping_for_update = true

  boot_disk {
    initialize_params {
      image = "cos-cloud/cos-stable"
      size  = 30
    }
  }
  attached_disk {
    source      = google_compute_disk.state[0].id
    device_name = "state"
  }
  network_interface {
    subnetwork = google_compute_subnetwork.subnetwork.id
  }
  service_account {
    email  = google_service_account.control.email
    scopes = ["cloud-platform"]
  }
  shielded_instance_config {
    enable_secure_boot          = true
    enable_vtpm                 = true
    enable_integrity_monitoring = true
  }
  metadata = {
    block-project-ssh-keys = "true"
    enable-oslogin         = "TRUE"
    google-logging-enabled = "true"
    user-data = templatefile("${path.module}/control.yaml", {
      registry = "${var.region}-docker.pkg.dev"
      images   = "${var.region}-docker.pkg.dev/${var.project}"
      bucket   = google_storage_bucket.bucket.name
      pipeline = var.control_pipeline
    })
  }
}

# Identity-Aware Proxy connects from these addresses alone.
resource "google_compute_firewall" "iap" {
  count                   = var.control ? 1 : 0
  name                    = "llm-assets-iap"
  network                 = google_compute_network.network.id
  direction               = "INGRESS"
  source_ranges           = ["35.235.240.0/20"]
  target_service_accounts = [google_service_account.control.email]
  allow {
    protocol = "tcp"
    ports    = ["22"]
  }
}

resource "google_iap_tunnel_instance_iam_member" "operators" {
  for_each = var.control ? toset(var.operators) : []
  zone     = local.control_zone
  instance = google_compute_instance.control[0].name
  role     = "roles/iap.tunnelResourceAccessor"
  member   = each.value
}

# Root on that machine, who may start its containers again.
resource "google_compute_instance_iam_member" "operators" {
  for_each      = var.control ? toset(var.operators) : []
  zone          = local.control_zone
  instance_name = google_compute_instance.control[0].name
  role          = "roles/compute.osAdminLogin"
  member        = each.value
}

# OS Login asks for this right on the account of the machine.
resource "google_service_account_iam_member" "control" {
  for_each           = var.control ? toset(var.operators) : []
  service_account_id = google_service_account.control.name
  role               = "roles/iam.serviceAccountUser"
  member             = each.value
}

locals {
  control_zone = "${var.region}-${var.control_zone}"
}

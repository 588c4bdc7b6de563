# Dataproc Serverless batches have no external addresses: they reach Google's APIs privately and each
# other through whatever port they choose.

resource "google_compute_network" "network" {
  name                    = "llm-assets"
  auto_create_subnetworks = false
  depends_on              = [google_project_service.apis]
}

resource "google_compute_subnetwork" "subnetwork" {
  name                     = "llm-assets"
  region                   = var.region
  network                  = google_compute_network.network.id
  ip_cidr_range            = "10.10.0.0/20"
  private_ip_google_access = true
}

resource "google_compute_firewall" "inside" {
  name          = "llm-assets-inside"
  network       = google_compute_network.network.id
  direction     = "INGRESS"
  source_ranges = [google_compute_subnetwork.subnetwork.ip_cidr_range]
  allow {
    protocol = "all"
  }
}

# Dagster's machine downloads base models from the Hugging Face Hub.
resource "google_compute_router" "router" {
  count   = var.internet || var.control ? 1 : 0
  name    = "llm-assets"
  region  = var.region
  network = google_compute_network.network.id
}

resource "google_compute_router_nat" "nat" {
  count                              = var.internet || var.control ? 1 : 0
  name                               = "llm-assets"
  router                             = google_compute_router.router[0].name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "ALL_SUBNETWORKS_ALL_IP_RANGES"
}

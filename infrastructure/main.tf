# Everything that pipelines with `platform: google_cloud` need in one project. docs/google_cloud.md
# leads through it; `llm-assets setup` writes what was made here into config/google_cloud.yaml.

terraform {
  required_version = ">= 1.5"
  required_providers {
    google      = { source = "hashicorp/google", version = "~> 7.0" }
    google-beta = { source = "hashicorp/google-beta", version = "~> 7.0" }
  }
}

provider "google" {
  project = var.project
  region  = var.region
}

# Budgets are asked for in the name of this project, whatever the credentials belong to. Nothing else
# is: while its APIs are being enabled, a project cannot be asked in its own name.
provider "google" {
  alias                 = "budget"
  project               = var.project
  user_project_override = true
  billing_project       = var.project
}

provider "google-beta" {
  project = var.project
  region  = var.region
}

locals {
  # Which APIs and rights runs need: what `llm-assets check` asks for, and what is made here.
  needed = yamldecode(file("${path.module}/../llm_assets/cloud/setup/rights.yaml"))
}

resource "google_project_service" "apis" {
  for_each           = toset(keys(local.needed.apis))
  service            = each.value
  disable_on_destroy = false
}

data "google_project" "project" {
  depends_on = [google_project_service.apis]
}

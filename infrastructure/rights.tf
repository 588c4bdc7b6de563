# Who may do what on which resource: the list of main.tf, and what Dagster's own machine may.

resource "google_service_account" "jobs" {
  account_id   = "llm-assets"
  display_name = "Jobs of llm-assets"
  depends_on   = [google_project_service.apis]
}

# It has no rights: Vertex AI lets it read the copy of its model, and whoever takes over a container
# that the world can ask gets nothing else.
resource "google_service_account" "serving" {
  account_id   = "llm-assets-serving"
  display_name = "Endpoints of llm-assets"
  depends_on   = [google_project_service.apis]
}

resource "google_service_account" "builder" {
  account_id   = "llm-assets-builder"
  display_name = "Image builds of llm-assets"
  depends_on   = [google_project_service.apis]
}

# Made by Google when the API is first used; here at once, so that it can be given its right.
resource "google_project_service_identity" "vertex_ai" {
  provider   = google-beta
  service    = "aiplatform.googleapis.com"
  depends_on = [google_project_service.apis]
}

locals {
  members = {
    operator  = var.operators
    control   = [google_service_account.control.member]
    jobs      = [google_service_account.jobs.member]
    builder   = [google_service_account.builder.member]
    vertex_ai = [google_project_service_identity.vertex_ai.member]
  }

  accounts = {
    jobs    = google_service_account.jobs.name
    serving = google_service_account.serving.name
    builder = google_service_account.builder.name
  }

  rights = merge({
    for holder, resources in local.needed.grants :
    holder => { for resource, roles in resources : resource => keys(roles) }
    }, {
    # An operator's, without builds and without what `check` alone looks at.
    control = {
      project = [
        "roles/aiplatform.user",
        "roles/batch.jobsEditor",
        "roles/bigquery.jobUser",
        "roles/dataproc.editor",
        "roles/logging.logWriter",
        "roles/serviceusage.serviceUsageConsumer",
        "roles/tpu.admin",
      ]
      bucket     = ["roles/storage.legacyBucketReader", "roles/storage.objectUser"]
      repository = ["roles/artifactregistry.reader"]
      secret     = ["roles/secretmanager.secretAccessor"]
      dataset    = ["roles/bigquery.dataViewer"]
      jobs       = ["roles/iam.serviceAccountUser"]
      serving    = ["roles/iam.serviceAccountUser"]
    }
  })

  # One entry a holder's member, resource and role, under a name that is known before anything exists.
  grants = merge([
    for holder, resources in local.rights : merge([
      for resource, roles in resources : merge([
        for role in roles : {
          for index, member in local.members[holder] :
          "${resource}/${role}/${holder}/${index}" => { resource = resource, role = role, member = member }
        }
      ]...)
    ]...)
  ]...)
}

resource "google_project_iam_member" "rights" {
  for_each = { for name, grant in local.grants : name => grant if grant.resource == "project" }
  project  = var.project
  role     = each.value.role
  member   = each.value.member
}

resource "google_storage_bucket_iam_member" "rights" {
  for_each = { for name, grant in local.grants : name => grant if grant.resource == "bucket" }
  bucket   = google_storage_bucket.bucket.name
  role     = each.value.role
  member   = each.value.member
}

resource "google_artifact_registry_repository_iam_member" "rights" {
  for_each   = { for name, grant in local.grants : name => grant if grant.resource == "repository" }
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = each.value.role
  member     = each.value.member
}

resource "google_secret_manager_secret_iam_member" "rights" {
  for_each  = { for name, grant in local.grants : name => grant if grant.resource == "secret" }
  secret_id = google_secret_manager_secret.hugging_face_token.secret_id
  role      = each.value.role
  member    = each.value.member
}

resource "google_secret_manager_secret_iam_member" "tracking" {
  for_each  = { for name, grant in local.grants : name => grant if grant.resource == "tracking" }
  secret_id = google_secret_manager_secret.weights_and_biases_key.secret_id
  role      = each.value.role
  member    = each.value.member
}

resource "google_bigquery_dataset_iam_member" "rights" {
  for_each   = { for name, grant in local.grants : name => grant if grant.resource == "dataset" && var.bigquery_dataset != "" }
  dataset_id = var.bigquery_dataset
  role       = each.value.role
  member     = each.value.member
}

resource "google_service_account_iam_member" "rights" {
  for_each           = { for name, grant in local.grants : name => grant if contains(keys(local.accounts), grant.resource) }
  service_account_id = local.accounts[each.value.resource]
  role               = each.value.role
  member             = each.value.member
}

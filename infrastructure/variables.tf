variable "project" {
  description = "The project's id. It exists already and has billing."
  type        = string
}

variable "region" {
  description = "One region for everything: jobs, bucket, images."
  type        = string
  default     = "us-central1"
}

variable "operators" {
  description = "Who runs Dagster, as IAM names them: user:ada@example.com, serviceAccount:..."
  type        = list(string)
}

variable "bigquery_dataset" {
  description = "Data set of this project with source text; empty where there is none."
  type        = string
  default     = ""
}

variable "soft_delete_days" {
  description = "Days for which deleted objects are kept, and paid for: 0, or 7 to 90. Rotated checkpoints are deleted objects."
  type        = number
  default     = 0
}

variable "internet" {
  description = "Whether Spark batches and Batch machines may reach the internet, by Cloud NAT; with `control` they may in any case."
  type        = bool
  default     = false
}

variable "billing_account" {
  description = "Id of the billing account, for a budget that alerts; empty makes none."
  type        = string
  default     = ""
}

variable "monthly_budget" {
  description = "Money a month, in the billing account's currency, of which 50, 90 and 100 % alert."
  type        = number
  default     = 500
}

variable "control" {
  description = "Whether a machine runs Dagster here; without it, operators run it on their own."
  type        = bool
  default     = false
}

variable "control_machine_type" {
  description = "Machine of Dagster. It loads the base model once, on its processor."
  type        = string
  default     = "e2-standard-4"
}

variable "control_zone" {
  description = "Letter of the zone of that machine."
  type        = string
  default     = "a"
}

variable "control_pipeline" {
  description = "Pipeline file that it runs, in the image `control`."
  type        = string
  default     = "config/llama_bigquery.yaml"
}

#!/usr/bin/env bash
# Builds an image with Cloud Build and prints its name: images/build.sh cuda|tpu|spark|serve|serve_transformers|control [--print]
# The tag is a hash of everything that goes into the image, so the same content is built once. What is
# printed names the image by its digest; with --print, which asks nobody, by its tag. A base image that
# has no digest yet gets the one of today, in the Dockerfile.
set -euo pipefail
started="$PWD"
cd "$(dirname "$0")/.."

usage() { echo "usage: images/build.sh cuda|tpu|spark|serve|serve_transformers|control [--print]" >&2; exit 2; }
[[ $# -ge 1 && -f "images/$1/Dockerfile" ]] || usage
[[ $# -eq 1 || "${2}" == "--print" ]] || usage

image="$1"
case "$image" in
  cuda | tpu) code="artifacts recipes pyproject.toml README.md LICENSE" ;;
  spark) code="artifacts spark_jobs" ;;
  serve | serve_transformers) code="artifacts serving" ;;
  control) code="artifacts config llm_assets recipes serving spark_jobs pyproject.toml README.md LICENSE workspace.yaml" ;;
esac
settings="${LLM_ASSETS_GOOGLE_CLOUD:-$PWD/config/google_cloud.yaml}"
# A relative path begins where this was started, as it does for `llm-assets`.
[[ "$settings" == /* ]] || settings="$started/$settings"
if [[ ! -f "$settings" ]]; then
  echo "There is no settings file $settings. Name another one with LLM_ASSETS_GOOGLE_CLOUD." >&2
  exit 1
fi
# A value may be followed by a comment, and by the line break of Windows.
setting() {
  sed -nE "s/^$1: *[\"']?([^[:space:]#\"']*).*/\1/p" "$settings" | sed -E 's/^(null|~)$//'
}
project="$(setting project)"
region="$(setting region)"
bucket="$(setting bucket)"
builder="$(setting builder_account)"
for key in project region bucket; do
  [[ -n "${!key}" ]] || { echo "$settings: $key is missing." >&2; exit 1; }
done

if [[ "${2:-}" != "--print" ]] && ! grep -q '^FROM .*@sha256:' "images/$image/Dockerfile"; then
  python3 images/pin.py "images/$image/Dockerfile"
fi
# With -z, since git quotes some names otherwise.
# shellcheck disable=SC2086
tag="$(git ls-files -z -co --exclude-standard -- "images/$image" requirements.lock $code |
  LC_ALL=C sort -z | while IFS= read -r -d '' file; do
    if [[ -f "$file" ]]; then printf '%s\0' "$file"; cat "$file"; fi
  done | sha256sum | cut -c1-16)"
name="$region-docker.pkg.dev/$project/llm-assets/$image:$tag"
if [[ "${2:-}" == "--print" ]]; then echo "$name"; exit 0; fi

digest() {
  gcloud artifacts docker images describe "$name" --project="$project" \
    --format="value(image_summary.fully_qualified_digest)"
}
if ! digest >/dev/null 2>&1; then
  account=()
  if [[ -n "$builder" ]]; then
    account=(--service-account="projects/$project/serviceAccounts/$builder")
  fi
  gcloud builds submit . --project="$project" --region="$region" "${account[@]}" \
    --gcs-source-staging-dir="gs://$bucket/builds" --config=images/cloudbuild.yaml \
    --substitutions="_IMAGE=$name,_DOCKERFILE=images/$image/Dockerfile" >&2
fi
if [[ "$image" == control ]]; then
  # What the machine of infrastructure/control.tf starts.
  gcloud artifacts docker tags add "$name" "${name%:*}:current" --project="$project" >&2
fi
digest

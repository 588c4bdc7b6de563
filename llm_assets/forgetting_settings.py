"""Settings of forgetting; no Dagster here."""

from pydantic import Field

from artifacts.settings import Settings


class ForgettingSettings(Settings):
    """What `llm-assets forget` does beside keeping a document out of every later corpus."""

    erase: bool = True
    """Whether its text is also taken out of the snapshots, corpora, shards and caches that were
    made before. Off, it stays there until retention removes them."""
    signing_key: str = ".llm_assets/forgetting.pem"
    """File with the ed25519 key, in PEM, that signs certificates; one that is absent is made, and
    its public half beside it with the ending `.pub`."""
    grace_days: float = Field(default=7, ge=0)
    """How long the weights of withdrawn versions stay, for going back; then cleaning removes
    them, except of a version that still serves."""

"""The models that training on a GPU is measured with."""

from dataclasses import dataclass

from recipes.model.decoder import DecoderShape


@dataclass(frozen=True)
class Size:
    """A model and its batch."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    length: int
    rows: int
    """Rows per step on the H200 and the H100."""
    aim: float
    """Tokens per second to reach on one H200."""

    @property
    def shape(self) -> DecoderShape:
        """The sizes as the decoder takes them."""
        return DecoderShape(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            layers=self.layers,
            heads=self.heads,
            key_value_heads=self.key_value_heads,
            head_dim=64,
            norm_eps=1e-5,
            attention_bias=False,
            output_bias=False,
            mlp_bias=False,
            query_key_norm=False,
            tied_embeddings=True,
            initializer_range=0.02,
            rope={"rope_type": "default", "rope_theta": 100_000.0},
        )


SIZES = {
    "135m": Size(576, 1536, 30, 9, 3, 49_152, 2048, 32, 300_000),
    # In rows of the length of the others': no aim was set for it.
    "135m-4096": Size(576, 1536, 30, 9, 3, 49_152, 4096, 16, 0),
    "360m": Size(960, 2560, 32, 15, 5, 49_152, 2048, 16, 110_000),
    "1b": Size(2048, 8192, 16, 32, 8, 128_256, 4096, 8, 60_000),
    # For a look at the program itself, on any machine.
    "tiny": Size(128, 256, 2, 2, 1, 512, 256, 2, 0),
}

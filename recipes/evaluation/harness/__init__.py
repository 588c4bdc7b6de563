"""Tasks of lm-eval, the language model evaluation harness."""

"""What each recipe teaches: which model it loads, how rows become batches, how it is scored."""

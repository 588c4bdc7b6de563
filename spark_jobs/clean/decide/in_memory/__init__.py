"""Decides in the driver's memory, on columns of whole arrays."""

"""Serves one model version over HTTP on this machine, and moves to another without an outage."""

"""Webserver, daemon and metrics as services of this machine, which come back when they die."""

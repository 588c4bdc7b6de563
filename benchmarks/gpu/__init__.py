"""The first hour on a GPU: `make gpu-kit` fills a folder here, `make gpu` runs it there."""

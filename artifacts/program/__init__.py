"""What every program of this project does alike: reports to Dagster, ends with its parent."""

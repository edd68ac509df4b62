"""What every experiment shares: labs, run directories, parts that can be resumed, figures and their verdicts."""

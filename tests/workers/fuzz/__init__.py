"""Input that nobody means well with: hypothesis and coverage-guided fuzzing of what comes from outside."""

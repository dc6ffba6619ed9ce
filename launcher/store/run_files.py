"""The names of the files of a run's folder, for those who read it without torch."""

RECIPE, METRICS, REPORT = "recipe.yaml", "metrics.jsonl", "report.json"
RESTARTS, ENDED = "restarts.jsonl", "ended.json"
ENVIRONMENT, SAMPLES = "environment.json", "samples.jsonl"
LOGS = "logs"  # the folder with what each rank prints

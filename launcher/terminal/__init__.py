"""Print to a person's terminal.

console.py makes tables, and the console that they are printed to.  units.py writes bytes, seconds
and counts for a person.  doing.py shows one line that says what is being done before there is a
plan.  as_json.py writes what a command or a run found for programs.  exit_status.py says how it
ended.
"""

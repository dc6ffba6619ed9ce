"""A plan, runs or a sweep as one HTML file, and the same data as JSON.

make_page.py         read this first
page_data.py         all that a page shows; page.schema.json says what each field means
plan_view.py         what a page shows of a plan; layout_view.py its modules, step_view.py acts
run_view.py          of a run's folder; trace_view.py its traced step; sweep_view.py of a sweep
serve_page.py        flowrun top --serve: a page of a run that follows it (live.js)

page.html has the colours of SBP; page.js and runs.js draw the data; vendor/ has uPlot, which draws
curves.
"""

"""Tables and pictures of plans and runs.

In the order in which a run becomes a page: `run` reads a run directory as far as it got, `step_times` says where the time of a
step goes, `compare` sets predictions beside measurements, `words` writes numbers and plans as people read them. `rows` and `tables`
make the tables of the terminal; `axis`, `line_chart`, `lanes` and `palette` say where every line, bar and tick stands;
`sections` and `html` make the page from `templates`, `perfetto` the trace, `frontier` PNG and SVG with matplotlib.
"""

"""Tables and pictures of plans and runs, in the order in which a run becomes a page.

    run          a run directory, read back as far as it got
    step_times   where the time of a step goes on each rank
    compare      predicted against measured
    words        numbers and plans as people read them
    rows tables  tables for the terminal
    axis palette line_chart lanes   where every line, bar and tick stands, and its colour
    sections html templates/        the page
    perfetto     both timelines as one trace
    pictures     PNG and SVG, with matplotlib
"""

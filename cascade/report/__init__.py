"""Pictures of a benchmark or of a trace: one HTML page that needs nothing but a browser.

Charts are drawn by plotly: its package carries the script that the page inlines, which costs 4.8 MB but no
second tool (altair needs a 33 MB converter for that), and figures are plain JSON, so that a change of theme
redraws them and tests can read every number back (bokeh's 1.3 MB would need a model of its own for either).
"""

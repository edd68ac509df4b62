"""Pictures of a topology: as text, SVG, PNG and Graphviz DOT, with a running lab's measured values where wanted.

`scene` says what a picture shows, `tracks` how the WAN links run; `text`, `svg` (with `layout`), `png` and `dot` draw.
The same plan gives the same bytes.
"""

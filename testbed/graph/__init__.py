"""Pictures of a topology as text, SVG, PNG and Graphviz DOT, with a running lab's measured values where wanted.

`scene` has the contents in words, `layout` their positions (with `measure`'s sizes); `text`, `svg` and `dot` draw.
The same plan gives the same bytes.
"""

"""Measuring a lab's WAN links against what they are asked to do: `measure` sends and receives, `judge` decides."""

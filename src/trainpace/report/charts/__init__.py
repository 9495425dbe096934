"""Pictures as data: one record, one pure function for each picture, drawn by whoever shows it."""

from trainpace.report.charts.chart import Axis, Bar, BarChart, BarGroup, Chart, Mark, Picture, Segment, Series

__all__ = ["Axis", "Bar", "BarChart", "BarGroup", "Chart", "Mark", "Picture", "Segment", "Series"]

"""The report of one or several runs: one HTML file that needs nothing from elsewhere.

:mod:`~deploy.report.collect` reads run folders into the plain data of :mod:`~deploy.report.model`,
:mod:`~deploy.report.figures` draws them, :mod:`~deploy.report.page` writes the page.
"""

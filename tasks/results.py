"""What Prefect remembers of task results within a flow run."""

from prefect.context import FlowRunContext


def forget_results() -> None:
    """Drop the links from results to the task runs that gave them.

    Prefect keeps a state for each result, and for each member of it, until the flow run ends, to draw which task used
    which. A flow of thousands of tasks that pass nothing on grows by them and gains nothing.
    """
    context = FlowRunContext.get()
    if context is not None:
        context.run_results.clear()
        context.task_run_assets.clear()

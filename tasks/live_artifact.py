"""An artifact that is brought up to date in place: one row of Prefect's database, however often it changes."""

from uuid import UUID

from prefect.artifacts import Artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactUpdate


class LiveArtifact:
    """Created when it is shown for the first time by this flow run, replaced from then on."""

    def __init__(self) -> None:
        self._id: UUID | None = None

    async def show(self, artifact: Artifact) -> None:
        """Let it be what `artifact` is. Key, type and description stay those of the first time."""
        async with get_client() as client:
            if self._id is None:
                self._id = (await artifact.acreate(client)).id
                return
            update = ArtifactUpdate(data=await artifact.aformat())
            # Not `client.update_artifact`: it also emits an event that holds the whole data, kept for days.
            await client.request(
                "PATCH",
                "/artifacts/{id}",
                path_params={"id": self._id},
                json=update.model_dump(mode="json", exclude_unset=True),
            )

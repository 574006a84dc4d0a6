"""Migration of running requests to other decode workers."""

from pdserve.services.decode.migration.outgoing import OutgoingMigrations

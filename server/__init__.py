"""The admin service. Installed as `kvtier.server`."""

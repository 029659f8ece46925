"""Where kvtier meets the engines. Installed as `kvtier.connectors`."""

"""Stand-in for the Retrieval task of the Long Range Arena (AAN), built from PeerRead."""

"""A stand-in for the Retrieval task of the Long Range Arena, made from PeerRead."""

"""Loading model files of halfbyte and other libraries, which are untrusted: everything is checked before it is used."""

"""What ktopt's web pages share: how one document is made of their parts, and scripts that both use."""

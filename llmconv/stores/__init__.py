"""Object stores: addresses such as `s3://bucket/folder`, and reading, writing and listing the objects below one."""

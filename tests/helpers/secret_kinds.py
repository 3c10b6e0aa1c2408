"""Secrets of thirty kinds, made up: the flag that each is given by, and its value."""

_LETTERS = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0"
KINDS = {
    # The flag's name shows it.
    "Huawei Cloud access key": ("--ak", "HPUAQ7VKZ2M1"),
    "Huawei Cloud secret key": ("--sk", "hunter2hunter2"),
    "short password": ("--pwd", "hunter2"),
    "password": ("--db-password", "hunter2"),
    "passphrase": ("--passphrase", "hunter2"),
    "access key": ("--accesskey", "hunter2"),
    "secret key": ("--obs-secret-key", "hunter2"),
    "security token": ("--securitytoken", "hunter2"),
    "ModelScope": ("--modelscope-token", "hunter2"),
    "Weights & Biases": ("--wandb-api-key", "hunter2"),
    "SwanLab": ("--swanlab_api_key", "hunter2"),
    "bearer": ("--bearer", "hunter2"),
    # The value's form shows it.
    "GitHub, personal": ("--note", "ghp_" + _LETTERS[:36]),
    "GitHub, OAuth": ("--note", "gho_" + _LETTERS[:36]),
    "GitHub, server": ("--note", "ghs_" + _LETTERS[:36]),
    "GitHub, fine-grained": ("--note", "github_pat_" + _LETTERS + "_" + _LETTERS),
    "GitLab": ("--note", "glpat-" + _LETTERS[:20]),
    "Hugging Face": ("--note", "hf_" + _LETTERS[:34]),
    "Amazon": ("--note", "AKIA" + "A1B2C3D4E5F6G7H8"),
    "Amazon, session": ("--note", "ASIA" + "A1B2C3D4E5F6G7H8"),
    "OpenAI": ("--note", "sk-" + _LETTERS),
    "OpenAI, project": ("--note", "sk-proj-" + _LETTERS),
    "Anthropic": ("--note", "sk-ant-api03-" + _LETTERS),
    "Slack": ("--note", "xoxb-" + _LETTERS[:24]),
    "Google": ("--note", "AIza" + _LETTERS[:35]),
    "PyPI": ("--note", "pypi-" + _LETTERS),
    "npm": ("--note", "npm_" + _LETTERS[:36]),
    "Alibaba Cloud": ("--note", "LTAI" + _LETTERS[:20]),
    "Tencent Cloud": ("--note", "AKID" + _LETTERS[:32]),
    "JWT": ("--note", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0." + _LETTERS),
}

module penstock.test/clients

go 1.26

require gocloud.dev v0.47.0

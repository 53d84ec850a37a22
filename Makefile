# AutoByte: `make` lists the targets.
# Settable: GO, PYTHON (which Python makes the environment), AUTOBYTE_CACHE (where it lies),
# DEMO_FLAGS, BENCH_FLAGS (passed on to the command).

GO ?= go
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2
LIBRARY := python/autobyte/libautobyte.so
export CGO_ENABLED := 1
export PYTHONPATH := $(CURDIR)/python

.DEFAULT_GOAL := help
.PHONY: help build venv demo test test-short lint bench clean need-go

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: need-go ## Build bin/autobyte and python/autobyte/libautobyte.so
	$(GO) build -o bin/autobyte ./cmd/autobyte
	$(GO) build -buildmode=c-shared -buildvcs=false -o bin/libautobyte.so ./cmd/libautobyte
	@# Renamed into place: a process that has the old library mapped keeps it whole.
	@mv bin/libautobyte.so $(LIBRARY) && rm -f bin/libautobyte.h && echo "built bin/autobyte and $(LIBRARY)"

venv: ## Make the Python environment (once, outside the clone) and print its path
	@venv=$$(tools/venv) && mkdir -p bin && ln -sfn "$$venv" bin/venv && echo "$$venv"

demo: build venv ## Train a real model with DDP and with AutoByte over a slow network (as root: shaped)
	@bin/autobyte demo $(DEMO_FLAGS)

test: build ## Run every test: go vet, go test -race, pytest
	@tools/test all

test-short: build ## Run the tests that take seconds and need no root
	@tools/test short

lint: need-go ## gofmt, go vet, staticcheck, ruff, compileall
	@GO="$(GO)" STATICCHECK="$(STATICCHECK)" tools/lint

bench: build venv ## Benchmarks of the Go packages, then a step of ResNet50 against DDP at 1 Gbit/s (root)
	$(GO) test -run '^$$' -bench . -benchmem ./internal/...
	@bin/autobyte bench --model resnet50 --workers 2 --engine external --vs ddp --rate 1gbit $(BENCH_FLAGS)

clean: ## Remove what was built here (the environment stays: it is outside the clone)
	rm -rf bin demo $(LIBRARY) python/build python/dist python/*.egg-info python/.pytest_cache .pytest_cache .ruff_cache
	find python -name __pycache__ -type d -prune -exec rm -rf {} +

need-go:
	@GO="$(GO)" tools/need-go

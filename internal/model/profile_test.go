package model

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestSaveAndLoad(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.json")
	f := func(p Profile) {
		t.Helper()
		if err := Save(path, p); err != nil {
			t.Fatal(err)
		}
		got, err := Load(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p, got); diff != "" {
			t.Errorf("%s changed on its way through a file (-want +got):\n%s", p.Name, diff)
		}
	}
	resnet, err := Bundled("resnet50")
	if err != nil {
		t.Fatal(err)
	}
	f(resnet)
	f(chain([3]int{1, 2, 3}))
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".profile-*")); len(left) > 0 {
		t.Errorf("Save left %v", left)
	}
}

func TestSaveRefusesAndKeepsTheOldFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.json")
	if err := os.WriteFile(path, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Save(path, Profile{}); err == nil {
		t.Error("an empty profile was saved")
	}
	if got, _ := os.ReadFile(path); string(got) != "old" {
		t.Errorf("the file holds %q after a refused save", got)
	}
}

func TestParseErrors(t *testing.T) {
	good, err := Marshal(chain([3]int{1, 2, 3}))
	if err != nil {
		t.Fatal(err)
	}
	f := func(old, replacement, wantMessage string) {
		t.Helper()
		text := strings.Replace(string(good), old, replacement, 1)
		if text == string(good) {
			t.Fatalf("%q is not in the profile", old)
		}
		_, err := Parse([]byte(text))
		if err == nil {
			t.Errorf("%q in place of %q was accepted", replacement, old)
		} else if !strings.Contains(err.Error(), wantMessage) {
			t.Errorf("%q in place of %q: error %q does not say %q", replacement, old, err, wantMessage)
		}
	}
	f("autobyte-profile/1", "autobyte-profile/2", "autobyte-profile/1")
	f(`"batch": 1`, `"batch": 0`, "batch is 0")
	f(`"batch"`, `"batsh"`, "batsh")
	f(`"device": "none"`, `"device": ""`, "device")
	f(`"kind": "estimated"`, `"kind": "guessed"`, "guessed")
	f(`"figure": "tensors"`, `"figure": "forward_s"`, "forward_s")
	f(`"from": "test"`, `"from": ""`, "where")
	f(`"forward_s":1`, `"forward_s":-1`, "forward_s is -1")
	f(`"bytes":12`, `"bytes":13`, "multiple of 4")
	f(`"bytes":12`, `"bytes":0`, "0 bytes")
	f(`"bytes":12`, `"bytes":9223372036854775804`, "at most")
	f(`"dtype":"float32"`, `"dtype":"int4"`, "bfloat16, float16, float32, float64")
	f(`"tensors":[{"name":"0.w","bytes":12,"dtype":"float32"}]`, `"tensors":[]`, "no tensors")
	f("  ]\n}\n", "  ]\n}\n{}", "follows")
}

func TestBundledNamesTheProfilesThereAre(t *testing.T) {
	_, err := Bundled("alexnet")
	if err == nil || !strings.Contains(err.Error(), "resnet50") {
		t.Errorf("error for an unknown name is %v, want one that names resnet50", err)
	}
	for _, name := range Names() {
		if p, err := Bundled(name); err != nil || p.Name != name {
			t.Errorf("bundled %s: name %q, error %v", name, p.Name, err)
		}
	}
}

func TestScaledErrors(t *testing.T) {
	f := func(p Profile, seconds float64) {
		t.Helper()
		if _, err := p.Scaled(seconds); err == nil {
			t.Errorf("scaling %s to %v s: want an error", p.Name, seconds)
		}
	}
	f(chain([3]int{1, 2, 3}), 0)
	f(chain([3]int{1, 2, 3}), -1)
	f(chain([3]int{0, 0, 3}), 1)
}

func TestScaledLeavesTheOriginal(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layers := drawChain(t)
		p, same := chain(layers...), chain(layers...)
		want := rapid.Float64Range(1e-3, 1e3).Draw(t, "seconds")
		scaled, err := p.Scaled(want)
		if err != nil {
			t.Fatal(err)
		}
		if got := scaled.ComputeSeconds(); got < want*(1-1e-9) || got > want*(1+1e-9) {
			t.Fatalf("scaled to %v s, computes %v s", want, got)
		}
		if scaled.Bytes() != p.Bytes() || scaled.Validate() != nil {
			t.Fatalf("scaling changed sizes or broke the profile: %v", scaled.Validate())
		}
		if diff := cmp.Diff(same, p); diff != "" {
			t.Fatalf("scaling changed the original:\n%s", diff)
		}
	})
}

func FuzzParse(f *testing.F) {
	good, err := Marshal(chain([3]int{1, 2, 3}, [3]int{4, 5, 0}))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		p, err := Parse(data)
		if err != nil {
			return
		}
		again, err := Marshal(p)
		if err != nil {
			t.Fatalf("parsed but cannot be written: %v", err)
		}
		back, err := Parse(again)
		if err != nil {
			t.Fatalf("written but cannot be read: %v\n%s", err, again)
		}
		if p.Bytes() != back.Bytes() || p.TensorCount() != back.TensorCount() || len(p.Layers) != len(back.Layers) {
			t.Fatalf("%+v became %+v", p, back)
		}
		if _, err := LowerBound(p, 4, 1e9); err != nil {
			t.Fatalf("valid but has no lower bound: %v", err)
		}
	})
}

{{/* Name of the release's objects. */}}
{{- define "jetcapture.name" -}}
{{- if contains "jetcapture" .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-jetcapture" (.Release.Name | trunc 29 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "jetcapture.selector" -}}
app.kubernetes.io/name: jetcapture
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "jetcapture.labels" -}}
{{ include "jetcapture.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "jetcapture.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "jetcapture.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{/* The configurations by the name of their capture, which is that of the file: `config` alone, or below each capture. */}}
{{- define "jetcapture.captures" -}}
{{- if .Values.captures -}}
{{- range $name, $capture := .Values.captures }}
{{ $name }}: {{ mergeOverwrite (deepCopy $.Values.config) (deepCopy ($capture | default dict)) | toYaml | nindent 2 }}
{{- end }}
{{- else -}}
jetcapture: {{ .Values.config | toYaml | nindent 2 }}
{{- end -}}
{{- end -}}

{{/* What the schema cannot say: settings that a capture has only after `config` and its own were put together. */}}
{{- define "jetcapture.check" -}}
{{- range $name, $capture := .Values.captures -}}
{{- if has $name (list "livez" "metrics" "readyz" "snapshot") -}}
{{- fail (printf "captures.%s: the replicas serve this name themselves; expected another one" $name) -}}
{{- end -}}
{{- range $section := list "http" "log" -}}
{{- if hasKey ($capture | default dict) $section -}}
{{- fail (printf "captures.%s.%s: one process has one, so it belongs in config.%s" $name $section $section) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $seen := dict -}}
{{- range $name, $config := include "jetcapture.captures" . | fromYaml -}}
{{- $where := ternary (printf "captures.%s" $name) "config" (not (empty $.Values.captures)) -}}
{{- range $section := list "nats" "source" "store" -}}
{{- if not (get $config $section) -}}
{{- fail (printf "%s.%s: required, but not set" $where $section) -}}
{{- end -}}
{{- end -}}
{{- $source := $config.source -}}
{{- if not $source.consumer -}}
{{- fail (printf "%s.source.consumer: required, but not set" $where) -}}
{{- end -}}
{{- $of := list -}}
{{- range list "stream" "streams" "bucket" "buckets" "object_store" -}}
{{- if get $source . }}{{ $of = append $of . }}{{ end -}}
{{- end -}}
{{- if not $of -}}
{{- fail (printf "%s.source: expected stream, streams, bucket, buckets or object_store, found none of them" $where) -}}
{{- end -}}
{{- if not $config.store.url -}}
{{- fail (printf "%s.store.url: required, but not set" $where) -}}
{{- end -}}
{{- $same := toJson (list $config.nats $source.consumer (pick $source "stream" "streams" "bucket" "buckets" "object_store")) -}}
{{- with get $seen $same -}}
{{- fail (printf "%s.source: the same consumer of the same stream as in %s; give one of them another consumer" $where .) -}}
{{- end -}}
{{- $_ := set $seen $same $where -}}
{{- if hasPrefix "file:" $config.store.url -}}
{{- include "jetcapture.checkPlace" (list $ (printf "%s.store.url" $where) (regexReplaceAll "^file:(//)?" $config.store.url "")) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.claim .Values.persistence.enabled -}}
{{- fail "persistence.enabled: claim names an existing claim already; set one of them" -}}
{{- end -}}
{{- if and .Values.persistence.enabled (gt (int .Values.replicas) 1) (not (has "ReadWriteMany" .Values.persistence.accessModes)) -}}
{{- fail (printf "persistence.accessModes: %d replicas need ReadWriteMany; set it, or replicas: 1" (int .Values.replicas)) -}}
{{- end -}}
{{- if and (or .Values.spool.claim .Values.spool.perPod) (not (include "jetcapture.spools" . | fromYaml)) -}}
{{- fail "spool: no capture has config.limits.spool, which says where it is and how large" -}}
{{- end -}}
{{- if and .Values.spool.claim .Values.spool.perPod -}}
{{- fail "spool.perPod: spool.claim names an existing claim already; set one of them" -}}
{{- end -}}
{{- end -}}

{{/* Fail unless a directory, given with the setting that names it, lies in a volume. */}}
{{- define "jetcapture.checkPlace" -}}
{{- $root := index . 0 -}}
{{- $path := printf "%s/" (trimSuffix "/" (index . 2)) -}}
{{- $places := list -}}
{{- if or $root.Values.claim $root.Values.persistence.enabled }}{{ $places = append $places "/var/lib/jetcapture/" }}{{ end -}}
{{- range $root.Values.volumeMounts }}{{ $places = append $places (printf "%s/" (trimSuffix "/" .mountPath)) }}{{ end -}}
{{- $found := false -}}
{{- range $places }}{{ if hasPrefix . $path }}{{ $found = true }}{{ end }}{{ end -}}
{{- if not (or $found (contains "${" $path)) -}}
{{- fail (printf "%s: %s is in no volume; set claim or persistence for /var/lib/jetcapture, or volumes and volumeMounts" (index . 1) (trimSuffix "/" $path)) -}}
{{- end -}}
{{- end -}}

{{/* Changes with every configuration. */}}
{{- define "jetcapture.checksum" -}}
{{- include "jetcapture.captures" . | sha256sum -}}
{{- end -}}

{{/* Port of config.http.listen. */}}
{{- define "jetcapture.port" -}}
{{- regexFind "[0-9]+$" .Values.config.http.listen -}}
{{- end -}}

{{/* Whole seconds, rounded up, of a duration such as 1h30m, 500ms or 90. */}}
{{- define "jetcapture.seconds" -}}
{{- if not (kindIs "string" .) -}}
{{- ceil (float64 .) | int64 -}}
{{- else if regexMatch "^[0-9.]+$" . -}}
{{- ceil (float64 .) | int64 -}}
{{- else if not (regexMatch "^([0-9.]+(ms|[dhms]))+$" .) -}}
{{- fail (printf "config: expected a duration such as 90s or 15m, got %s" .) -}}
{{- else -}}
{{- $units := dict "d" 86400.0 "h" 3600.0 "m" 60.0 "s" 1.0 "ms" 0.001 -}}
{{- $sum := 0.0 -}}
{{- range regexFindAll "[0-9.]+(ms|[dhms])" . -1 -}}
{{- $sum = addf $sum (mulf (float64 (regexFind "^[0-9.]+" .)) (get $units (regexFind "[a-z]+$" .))) -}}
{{- end -}}
{{- ceil $sum | int64 -}}
{{- end -}}
{{- end -}}

{{/* Whole MiB, rounded up, of a size such as 1GiB, 500MB or 1048576. */}}
{{- define "jetcapture.mebibytes" -}}
{{- if not (kindIs "string" .) -}}
{{- ceil (divf (float64 .) 1048576.0) | int64 -}}
{{- else if not (regexMatch "^[0-9.]+(B|[Kk]B|[MGT]B|[KMGT]iB)?$" .) -}}
{{- fail (printf "config: expected a size such as 512MiB or 1GiB, got %s" .) -}}
{{- else -}}
{{- $units := dict "" 1.0 "B" 1.0 "KB" 1e3 "kB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 "KiB" 1024.0 "MiB" 1048576.0 "GiB" 1073741824.0 "TiB" 1099511627776.0 -}}
{{- ceil (divf (mulf (float64 (regexFind "^[0-9.]+" .)) (get $units (regexFind "[A-Za-z]*$" .))) 1048576.0) | int64 -}}
{{- end -}}
{{- end -}}

{{/* MiB of messages that all captures of a process may hold. */}}
{{- define "jetcapture.memory" -}}
{{- $sum := 0 -}}
{{- range $config := include "jetcapture.captures" . | fromYaml -}}
{{- $limits := $config.limits | default dict -}}
{{- $sum = add $sum (include "jetcapture.mebibytes" ($limits.memory | default "1GiB")) -}}
{{- end -}}
{{- $sum -}}
{{- end -}}

{{/* Longest time, in seconds, that a process needs to drain. */}}
{{- define "jetcapture.drain" -}}
{{- $longest := 0 -}}
{{- range $config := include "jetcapture.captures" . | fromYaml -}}
{{- $longest = max $longest (include "jetcapture.seconds" ($config.drain_timeout | default "60s")) -}}
{{- end -}}
{{- $longest -}}
{{- end -}}

{{/* Longest time, in seconds, that a message waits in its block. */}}
{{- define "jetcapture.maxAge" -}}
{{- $longest := 0 -}}
{{- range $config := include "jetcapture.captures" . | fromYaml -}}
{{- $block := $config.block | default dict -}}
{{- $longest = max $longest (include "jetcapture.seconds" ($block.max_age | default $block.interval | default "15m")) -}}
{{- end -}}
{{- $longest -}}
{{- end -}}

{{/* MiB of spool by directory, for all captures that use it. */}}
{{- define "jetcapture.spools" -}}
{{- $sizes := dict -}}
{{- range $config := include "jetcapture.captures" . | fromYaml -}}
{{- with ($config.limits | default dict).spool -}}
{{- $_ := set $sizes .path (add (get $sizes .path | default 100) (include "jetcapture.mebibytes" .size)) -}}
{{- end -}}
{{- end -}}
{{- toYaml $sizes -}}
{{- end -}}

{{/* What captures, maintenance and jobs have in their environment. */}}
{{- define "jetcapture.environment" -}}
{{- with .Values.env }}
env: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.envFrom }}
envFrom: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* What they mount. */}}
{{- define "jetcapture.volumeMounts" -}}
- {name: config, mountPath: /etc/jetcapture, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- range $index, $secret := .Values.secrets }}
- {name: secret-{{ $index }}, mountPath: {{ $secret.mountPath | quote }}, readOnly: true}
{{- end }}
{{- if or .Values.claim .Values.persistence.enabled }}
- {name: archive, mountPath: /var/lib/jetcapture}
{{- end }}
{{- with .Values.volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "jetcapture.volumes" -}}
- name: config
  configMap: {name: {{ include "jetcapture.name" . }}}
- name: tmp
  emptyDir: {}
{{- range $index, $secret := .Values.secrets }}
- name: secret-{{ $index }}
  secret: {secretName: {{ $secret.name | quote }}, defaultMode: 0440}
{{- end }}
{{- if or .Values.claim .Values.persistence.enabled }}
- name: archive
  persistentVolumeClaim: {claimName: {{ .Values.claim | default (printf "%s-archive" (include "jetcapture.name" .)) | quote }}}
{{- end }}
{{- with .Values.volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "jetcapture.scheduling" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .Values.initContainers }}
initContainers: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Labels that Prometheus gives the metrics of this release's pods, and of no other's. */}}
{{- define "jetcapture.series" -}}
{{- printf "namespace=%q,pod=~\"%s-(maintain-)?[a-z0-9]+-[a-z0-9]+\"" .Release.Namespace (include "jetcapture.name" .) -}}
{{- end -}}
